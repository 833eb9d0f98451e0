"""Two engines and two API servers of one real `vllm serve`: nothing collides, and one request reaches both engines."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from meridian.vllm.bench.model import model_dir
from serving import BUDGETS, SCHEDULER, TOKEN, Fleet, ask, configure
from transformers import AutoTokenizer

pytestmark = pytest.mark.whole_machine
THINK_TOKENS = 24
REQUESTS = 32


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    # A short path, for its sockets.
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as name:
        folder = Path(name)
        config = configure(folder, '[policy]\nrecord_dir = "recordings"\n')
        options = [*SCHEDULER, *BUDGETS, "--dtype", "float32", "--api-server-count", "2"]
        plugins = {"VLLM_PLUGINS": "meridian,meridian_admin", "VLLM_SERVER_DEV_MODE": "1"}
        running = Fleet(folder, config, options, plugins)
        try:
            running.wait_until_ready(2)
            yield running
            running.stop()
        finally:
            running.kill()


def own(process: dict[str, Any], method: str, target: str) -> Any:
    """Ask one engine over its private socket."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(process["socket"].removeprefix("unix:"))
    connection.request(method, target, headers={"Authorization": f"Bearer {TOKEN}"})
    return json.loads(connection.getresponse().read())


def active(fleet: Fleet, slot: int = 0) -> list[str]:
    """The name of the policy that decides in each engine."""
    return [own(process, "GET", "/v1/policies")["slots"][slot]["active"]["name"] for process in fleet.found()]


def thinking(i: int) -> dict[str, Any]:
    """A chat whose thinking the client limits."""
    return {
        "model": "tiny-random",
        "messages": [{"role": "user", "content": f"request {i}"}],
        "max_tokens": THINK_TOKENS + 24,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "vllm_xargs": {"meridian_think_budget": THINK_TOKENS},
    }


def test_both_engines_are_found(fleet: Fleet) -> None:
    found = fleet.found()
    assert len(found) == 2
    assert len({process["socket"] for process in found}) == 2
    # The port is that of the first; the other says so.
    assert len([process for process in found if process["admin"] is not None]) == 1
    code, said = fleet.ctl("status", "--all")
    assert code == 0
    assert {each["status"]["pid"] for each in said["processes"]} == {process["pid"] for process in found}
    assert sorted(each["status"]["dp_rank"] for each in said["processes"]) == [0, 1]
    assert sorted(process["dp_rank"] for process in found) == [0, 1]
    problems = [line for each in said["processes"] for line in each["status"].get("problems", [])]
    assert len(problems) == 1
    assert "another process listens there" in problems[0]


def test_budgets_hold_in_both_engines(fleet: Fleet) -> None:
    def think(i: int) -> tuple[int, list[int]]:
        headers = {"X-data-parallel-rank": str(i % 2)}
        code, said = ask(fleet.base, "POST", "/v1/chat/completions", thinking(i), headers)
        assert code == 200, said
        return i % 2, said["choices"][0]["token_ids"]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(think, range(REQUESTS)))
    end = AutoTokenizer.from_pretrained(model_dir()).convert_tokens_to_ids("</think>")
    for _, tokens in answers:
        assert end in tokens, "the limit ended the thinking"
        assert tokens.index(end) <= THINK_TOKENS
    for process in fleet.found():
        budget = own(process, "GET", "/v1/status")["budget"]
        assert budget["missed"] == 0
        assert sum(budget["forced"]) == REQUESTS // 2, "each engine ended the thinking of its own requests"
    assert "no scheduler of this engine signed" not in fleet.log()


def test_shadows_and_recordings_do_not_collide(fleet: Fleet, policies: Path) -> None:
    component = (policies / "output-first.wasm").read_bytes()
    code, said = fleet.admin("PUT", "/policies/dispatch?mode=shadow", component)
    assert code == 200, said
    for i in range(8):
        fleet.generate(prompt=[5 + i, 6, 7], max_tokens=8)
    for process in fleet.found():
        shadow = own(process, "GET", "/v1/policies")["slots"][0]["shadow"]
        assert shadow["version"]["name"] == "output-first"
        assert shadow["faults"] == 0
    assert fleet.admin("DELETE", "/policies/dispatch/shadow")[0] == 200
    recorded = {name.name.split("-")[1] for name in (fleet.folder / "recordings").iterdir() if "-" in name.name}
    assert {str(process["pid"]) for process in fleet.found()} <= recorded


def test_one_request_changes_both_engines(fleet: Fleet, policies: Path) -> None:
    component = (policies / "srpt.wasm").read_bytes()
    code, said = fleet.admin("PUT", "/policies/dispatch", component)
    assert code == 200, said
    assert [row["dp_rank"] for row in said["engines"]] == [0, 1]
    assert [row["answer"]["action"] for row in said["engines"]] == ["swap", "swap"]
    assert [(each["version"]["name"], each["dp_ranks"]) for each in said["active"]] == [("srpt", [0, 1])]
    assert active(fleet) == ["srpt", "srpt"]
    code, said = fleet.admin("PUT", "/policies/dispatch", {"source": "native:fcfs"})
    assert (code, active(fleet)) == (200, ["fcfs", "fcfs"]), said
    code, said = fleet.admin("POST", "/policies/dispatch/rollback")
    assert (code, active(fleet)) == (200, ["srpt", "srpt"]), said
    code, said = fleet.admin("GET", "/status")
    assert code == 200
    assert {row["answer"]["pid"] for row in said["engines"]} == {process["pid"] for process in fleet.found()}


def test_ctl_changes_both_engines(fleet: Fleet) -> None:
    code, said = fleet.ctl("swap", "dispatch", "native:fcfs", "--all")
    assert code == 0, said
    assert len(said["engines"]) == 2
    assert [(each["active"]["name"], len(each["engines"])) for each in said["versions"]] == [("fcfs", 2)]
    assert active(fleet) == ["fcfs", "fcfs"]


def test_partial_failure_is_said(fleet: Fleet) -> None:
    assert fleet.admin("PUT", "/policies/dispatch", {"source": "native:srpt"})[0] == 200
    first, _ = fleet.found()
    # One engine has a shadow, the other has none.
    code, _ = fleet.ctl("--pid", str(first["pid"]), "shadow", "dispatch", "native:fcfs")
    assert code == 0
    code, said = fleet.admin("POST", "/policies/dispatch/promote")
    assert code == 502
    assert said["error"].startswith("1 of 2 engines did not do as asked: dp_rank ")
    assert sorted(row["code"] for row in said["engines"]) == [200, 409]
    assert [len(each["dp_ranks"]) for each in said["active"]] == [1]
    assert sorted(active(fleet)) == ["fcfs", "srpt"]
    code, said = fleet.admin("PUT", "/policies/dispatch", {"source": "native:balanced"})
    assert (code, active(fleet)) == (200, ["balanced", "balanced"]), said


def test_refusals_are_one_line_of_json(fleet: Fleet) -> None:
    before = active(fleet)
    for token in (None, "", "a-token-of-24-characterS", TOKEN + "x", TOKEN[:-1], "\xe9" * 24):
        for method, path in (
            ("GET", "/status"),
            ("PUT", "/policies/dispatch"),
            ("POST", "/policies/dispatch/rollback"),
        ):
            code, said = fleet.admin(method, path, b"" if method != "GET" else None, token=token)
            assert (code, list(said)) == (401, ["error"]), said
    for method, path, body, code, why in [
        ("PUT", "/policies/nothing", {"source": "native:fcfs"}, 404, "no such slot"),
        ("PUT", "/policies/dispatch", {"source": "native:nothing"}, 422, "unknown native policy"),
        ("PUT", "/policies/dispatch", b"garbage", 422, "not a component"),
        ("PUT", "/policies/dispatch?mode=x", {"source": "native:fcfs"}, 400, "the query must be mode="),
        ("POST", "/policies/dispatch", b"", 405, "no such method"),
        ("GET", "/nothing", None, 404, "no such path"),
    ]:
        found, said = fleet.admin(method, path, body)
        assert found == code, said
        assert said["error"].startswith("2 of 2 engines did not do as asked: dp_rank 0: ")
        assert why in said["error"]
        assert "\n" not in said["error"]
    assert active(fleet) == before
    # Not a route of the admin listener, and none of vLLM's.
    assert ask(fleet.base, "GET", "/meridian/metrics")[0] == 404


def test_collective_rpc_reaches_both_schedulers(fleet: Fleet, policies: Path) -> None:
    def rpc(**kwargs: str) -> tuple[int, Any]:
        return ask(fleet.base, "POST", "/collective_rpc", {"method": "meridian_admin", "kwargs": kwargs})

    native = json.dumps({"source": "native:srpt"})
    code, said = rpc(request="PUT /v1/policies/dispatch", token=TOKEN, body=native)
    assert code == 200, said
    # vLLM answers for the first engine; both have done it.
    (row,) = said["results"]
    assert (row["dp_rank"], row["answer"]["active"]["name"]) == (0, "srpt")
    assert active(fleet) == ["srpt", "srpt"]
    component = base64.b64encode((policies / "fcfs.wasm").read_bytes()).decode()
    assert rpc(request="PUT /v1/policies/dispatch", token=TOKEN, component=component)[0] == 200
    assert active(fleet) == ["fcfs", "fcfs"]
    for refused in (
        {"request": "PUT /v1/policies/dispatch", "body": native},
        {"request": "GET /v1/status"},
        {"request": "PUT /v1/policies/dispatch", "token": TOKEN, "component": "?"},
        {"token": TOKEN, "nothing": ""},
    ):
        assert rpc(**refused)[0] >= 400
    assert active(fleet) == ["fcfs", "fcfs"]
    code, said = fleet.admin("PUT", "/policies/dispatch", {"source": "native:balanced"})
    assert code == 200, said
