"""Two real engines and `meridian handoff` before them: one thinks, the other one answers, and a client sees one."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm
from meridian.vllm.bench.model import reasoner_dir
from serving import BUDGETS, CONNECTOR, SCHEDULER, Fleet, ask, configure, free_port

# The connector overrides private methods of this vLLM, and `scripts/fetch.sh handoff` fetches NIXL for it (ADR 0031).
pytestmark = [
    pytest.mark.whole_machine,
    pytest.mark.skipif(not vllm.__version__.startswith("0.32."), reason="NIXL is pinned for vLLM 0.32"),
]

ROOT = Path(__file__).resolve().parents[3]
MODEL = '[scheduler]\nmin_think_tokens = 0\n[model]\nthink_start = "<think>"\nthink_end = "</think>"\n'
BLOCK = 32
# Words of the reasoner: numbers are themselves.
NUMBERS, OPERATORS = range(23), (23, 24, 25)
QUESTION, BOS, THINK, THINK_END = 27, 33, 36, 37
MAX_TOKENS = 240
QUESTIONS = 96
# Looks at the threads of an idle engine.
LOOKS = 200


class Front:
    """A running `meridian handoff`."""

    def __init__(self, think: Fleet, answer: Fleet, *options: str) -> None:
        command = [sys.executable, "-m", "meridian", "handoff", "--think", think.base, "--answer", answer.base]
        command += ["--listen", "127.0.0.1:0", "--think-end", "</think>", "--threshold-blocks", "1", *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "MERIDIAN_CONFIG": ""}
        )
        assert self.process.stdout is not None
        self.base = "http://" + self.process.stdout.readline().split()[2].rstrip(";")

    def counters(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.base}/metrics") as response:
            lines = response.read().decode().splitlines()
        return {name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines if not x.startswith("#"))}


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Fleet, Fleet]]:
    lines = subprocess.check_output([ROOT / "scripts" / "fetch.sh", "handoff"], text=True).splitlines()
    nixl = dict(line.split("=", 1) for line in lines)
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as name:
        running = []
        for core in range(2):
            folder = Path(name) / str(core)
            folder.mkdir()
            own = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "VLLM_PLUGINS": "meridian"}
            own["VLLM_CPU_OMP_THREADS_BIND"] = str(core % (os.cpu_count() or 1))
            options = [*SCHEDULER, *BUDGETS, "--dtype", "float32", "--kv-transfer-config", json.dumps(CONNECTOR)]
            config = configure(folder, MODEL)
            running.append(Fleet(folder, config, options, {**nixl, **own}, 1, reasoner_dir()))
        try:
            for engine in running:
                engine.wait_until_ready()
            yield running[0], running[1]
        finally:
            for engine in running:
                engine.kill()


@pytest.fixture(scope="module")
def front(engines: tuple[Fleet, Fleet]) -> Iterator[Front]:
    running = Front(*engines)
    yield running
    running.process.kill()


def prompt(seed: int) -> list[int]:
    """A question; its length differs."""
    rng = random.Random(seed)
    chain = [rng.choice(NUMBERS)]
    for _ in range(2 + seed % 4):
        chain += [rng.choice(OPERATORS), rng.choice(NUMBERS)]
    return [BOS] * (1 + seed % 7) + [*chain, QUESTION, THINK]


def completion(base: str, tokens: list[int], **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny-random", "prompt": tokens, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    code, said = ask(base, "POST", "/v1/completions", {**body, "return_token_ids": True, **fields})
    assert code == 200, said
    return said


def chunks(base: str, path: str, body: dict[str, Any], after: Any = None) -> list[dict[str, Any]]:
    """The chunks of a stream; `after` is called with all so far after each."""
    data = json.dumps({"model": "tiny-random", "stream": True, "temperature": 0, **body}).encode()
    request = urllib.request.Request(base + path, data, {"Content-Type": "application/json"})
    found: list[dict[str, Any]] = []
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            text = line.decode().removeprefix("data: ").strip()
            if text == "[DONE]":
                return found
            if text:
                found.append(json.loads(text))
                if after is not None:
                    after(found)
    raise AssertionError("the stream broke off")


def token_ids(found: list[dict[str, Any]]) -> list[int]:
    return [token for chunk in found if chunk["choices"] for token in chunk["choices"][0].get("token_ids") or []]


def test_tokens_are_those_of_one_engine(engines: tuple[Fleet, Fleet], front: Front) -> None:
    # Of these the first engine computes exactly full blocks, one token less, or one more.
    wanted = {0: 0, 1: 0, BLOCK - 1: 0}
    prompts = [prompt(seed) for seed in range(QUESTIONS)]
    batch = {"prompt": prompts, "stop_token_ids": [THINK_END], "include_stop_str_in_output": True}
    thoughts = completion(engines[0].base, [], **batch)["choices"]
    for tokens, thought in zip(prompts, thoughts, strict=True):
        computed = len(tokens) + len(thought["token_ids"]) - 1
        if thought["finish_reason"] != "stop" or wanted.get(computed % BLOCK, 2) == 2:
            continue
        one = completion(engines[0].base, tokens)["choices"][0]
        both = completion(front.base, tokens)["choices"][0]
        assert both["token_ids"] == one["token_ids"]
        assert (both["text"], both["finish_reason"]) == (one["text"], one["finish_reason"])
        assert computed == len(tokens) + one["token_ids"].index(THINK_END)
        wanted[computed % BLOCK] += 1
    assert min(wanted.values()) > 0
    counters = front.counters()
    assert handed_over(counters) == sum(wanted.values())
    assert not [name for name in counters if "first_engine" in name]


def handed_over(counters: dict[str, float]) -> float:
    return sum(count for name, count in counters.items() if name.startswith("meridian_handoff_handed_over_total"))


def test_blocks_were_pulled(engines: tuple[Fleet, Fleet], front: Front) -> None:
    before = external_tokens(engines[1])
    completion(front.base, prompt(2), cache_salt="fresh")
    assert external_tokens(engines[1]) > before


def external_tokens(engine: Fleet) -> float:
    """Tokens whose KV came from another engine."""
    with urllib.request.urlopen(f"{engine.base}/metrics") as response:
        lines = response.read().decode().splitlines()
    return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith("vllm:external_prefix_cache_hits_total"))


def test_streams(engines: tuple[Fleet, Fleet], front: Front) -> None:
    body = {"prompt": prompt(3), "max_tokens": MAX_TOKENS, "ignore_eos": True, "return_token_ids": True}
    body["stream_options"] = {"include_usage": True}
    one = chunks(engines[0].base, "/v1/completions", body)
    both = chunks(front.base, "/v1/completions", body)
    assert token_ids(both) == token_ids(one)
    assert {chunk["id"] for chunk in both} == {both[0]["id"]}
    assert both[-1]["usage"]["completion_tokens"] == one[-1]["usage"]["completion_tokens"]

    def text(found: list[dict[str, Any]]) -> str:
        return "".join(chunk["choices"][0]["text"] for chunk in found if chunk["choices"])

    assert text(both) == text(one)


@pytest.mark.exhaustive
def test_chats(engines: tuple[Fleet, Fleet], front: Front) -> None:
    body: dict[str, Any] = {"model": "tiny-random", "messages": [{"role": "user", "content": "7 + 5 * 3"}]}
    body |= {"temperature": 0, "max_tokens": MAX_TOKENS}
    answers = [ask(base, "POST", "/v1/chat/completions", body)[1] for base in (engines[0].base, front.base)]
    messages = [answer["choices"][0]["message"] for answer in answers]
    assert messages[1] == messages[0]
    assert messages[0]["reasoning"]
    assert answers[1]["choices"][0]["finish_reason"] == answers[0]["choices"][0]["finish_reason"] == "stop"
    assert answers[1]["usage"]["completion_tokens"] == answers[0]["usage"]["completion_tokens"]

    def deltas(base: str, field: str) -> str:
        found = chunks(base, "/v1/chat/completions", body)
        return "".join(chunk["choices"][0]["delta"].get(field) or "" for chunk in found if chunk["choices"])

    for field in ("reasoning", "content"):
        assert deltas(front.base, field) == deltas(engines[0].base, field) == messages[0][field]


@pytest.mark.exhaustive
def test_thinking_that_a_budget_ends(engines: tuple[Fleet, Fleet], front: Front) -> None:
    fields = {"vllm_xargs": {"meridian_think_budget": 12}}
    one = completion(engines[0].base, prompt(9), **fields)["choices"][0]
    before = handed_over(front.counters())
    both = completion(front.base, prompt(9), **fields)["choices"][0]
    assert both["token_ids"].index(THINK_END) <= 12
    assert both["token_ids"] == one["token_ids"]
    assert handed_over(front.counters()) == before + 1


@pytest.mark.exhaustive
def test_limits_of_blocks(engines: tuple[Fleet, Fleet]) -> None:
    """A client's limits decide whether the blocks are offered; the first engine counts the tokens it has computed."""
    tokens = prompt(5)
    offered = first_part(engines[0], tokens, {"min_blocks": 1})
    computed = offered["remote_num_tokens"]
    assert computed == len(tokens) + offered["thought"] - 1
    blocks = -(-computed // BLOCK)
    assert len(offered["remote_block_ids"][0]) == blocks
    for limits, is_offered in (
        ({"min_blocks": blocks}, True),
        ({"min_blocks": blocks + 1}, False),
        ({"max_blocks": blocks}, True),
        ({"max_blocks": blocks - 1}, False),
        ({"min_blocks": "all", "max_blocks": None}, True),
    ):
        assert ("remote_block_ids" in first_part(engines[0], tokens, limits)) == is_offered, limits


def first_part(engine: Fleet, tokens: list[int], limits: dict[str, Any]) -> dict[str, Any]:
    """What the engine that thinks offers at the end of thinking, and how many tokens the thinking has."""
    asks = {"do_remote_decode": True, "meridian_handoff": limits}
    said = completion(engine.base, tokens, stop_token_ids=[THINK_END], kv_transfer_params=asks)["choices"][0]
    offered = json.loads(said["stop_reason"]) if isinstance(said["stop_reason"], str) else {}
    return {**offered, "thought": len(said["token_ids"])}


@pytest.mark.exhaustive
def test_engines_compute_on_their_own_cores(engines: tuple[Fleet, Fleet]) -> None:
    """With the connector of vLLM itself, both compute on the last core, and a thread of NIXL never sleeps."""
    for engine in engines:
        (worker,) = (folder for folder in processes(engine.process.pid) if "Worker" in (folder / "cmdline").read_text())
        assert status(worker)["Cpus_allowed_list"] == engine.env["VLLM_CPU_OMP_THREADS_BIND"]
        # vLLM's own thread polls for a second after a request, and the others wait for the core meanwhile.
        asleep = 0
        for _ in range(LOOKS * LOOKS * LOOKS):
            asleep = asleep + 1 if status(worker)["State"][0] == "S" else 0
            if asleep == LOOKS:
                break
        assert asleep == LOOKS
        # A thread that polls without a pause is always ready to run.
        states: dict[str, set[str]] = {}
        for _ in range(LOOKS):
            for thread in (worker / "task").iterdir():
                # One that ended since the look at the folder has no status.
                with contextlib.suppress(OSError):
                    state = status(thread)["State"][0]
                    states.setdefault(thread.name, set()).add(state)
        there = {thread.name for thread in (worker / "task").iterdir()}
        assert there & states.keys()
        assert all("S" in seen for name, seen in states.items() if name in there)


def processes(group: int) -> list[Path]:
    """Folders under /proc of a process group."""

    def is_of_group(folder: Path) -> bool:
        try:
            return os.getpgid(int(folder.name)) == group
        except ProcessLookupError:
            return False

    return [folder for folder in Path("/proc").glob("[0-9]*") if is_of_group(folder)]


def status(folder: Path) -> dict[str, str]:
    """What the kernel says of a process or a thread."""
    lines = (line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return {name: value.strip() for name, value in lines}


@pytest.mark.exhaustive
def test_the_policy_expected_time(engines: tuple[Fleet, Fleet]) -> None:
    """With nothing measured, requests move; then both engines are measured, and no choice changes a token."""
    front = Front(*engines, "--policy", "expected-time")
    try:
        for seed in range(6):
            body = {"prompt": prompt(40 + seed), "max_tokens": MAX_TOKENS, "ignore_eos": True, "return_token_ids": True}
            one = token_ids(chunks(engines[0].base, "/v1/completions", body))
            assert token_ids(chunks(front.base, "/v1/completions", body)) == one
        with urllib.request.urlopen(f"{front.base}/meridian/handoff") as response:
            said = json.loads(response.read())
        assert said["requests"] == 6
        assert said["engines"][0]["handed_over"] > 0
        assert min(said["think_itl_ms"], said["engines"][0]["begin_ms"], said["engines"][0]["itl_ms"]) > 0
    finally:
        front.process.kill()
        front.process.wait()


@pytest.mark.exhaustive
def test_an_interrupt_ends_the_front(engines: tuple[Fleet, Fleet]) -> None:
    front = Front(*engines)
    try:
        completion(front.base, prompt(6))
        front.process.send_signal(signal.SIGINT)
        assert front.process.wait(60) == 130
    finally:
        front.process.kill()


@pytest.mark.exhaustive
def test_wrong_parameters_are_computed_again(engines: tuple[Fleet, Fleet]) -> None:
    tokens = prompt(4)
    one = completion(engines[0].base, tokens)["choices"][0]["token_ids"]
    asks = {"do_remote_decode": True, "meridian_handoff": {"min_blocks": 1}}
    first = completion(engines[0].base, tokens, stop_token_ids=[THINK_END], kv_transfer_params=asks)["choices"][0]
    given = json.loads(first["stop_reason"])
    all_tokens = tokens + first["token_ids"]
    for wrong in ({"remote_port": free_port()}, {"remote_engine_id": "another"}):
        rest = completion(
            engines[1].base,
            all_tokens,
            max_tokens=MAX_TOKENS - len(first["token_ids"]),
            kv_transfer_params={**given, **wrong},
            cache_salt=str(wrong),
        )
        assert first["token_ids"] + rest["choices"][0]["token_ids"] == one


# The last one: it ends an engine.
def test_an_engine_that_dies_while_it_answers(engines: tuple[Fleet, Fleet], front: Front) -> None:
    body = {"prompt": prompt(0), "max_tokens": 300, "ignore_eos": True, "return_token_ids": True}
    one = token_ids(chunks(engines[0].base, "/v1/completions", body))

    def kill(found: list[dict[str, Any]]) -> None:
        if THINK_END in (tokens := token_ids(found)) and len(tokens) > tokens.index(THINK_END) + 8:
            engines[1].kill()

    assert token_ids(chunks(front.base, "/v1/completions", body, kill)) == one
    # The next one finds nobody, or is kept because the engine failed a moment ago.
    assert token_ids(chunks(front.base, "/v1/completions", body)) == one
    counters = front.counters()
    reasons = {name.split('"')[1]: int(count) for name, count in counters.items() if "first_engine" in name}
    assert reasons in ({"broken": 1, "unreachable": 1}, {"broken": 1, "failing": 1})
