"""Thinking budgets of the OpenAI server, as clients see them. The engine is a process of its own and the worker that
samples is another, so that orders and entropies cross processes; on CPU vLLM has no other way to serve."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving import free_port
from test_serve import Server

THINK_TOKENS = 200


class BudgetServer(Server):
    """A server with the logits processor; `listener` is Meridian's own address."""

    def __init__(self, folder: Path, *options: str) -> None:
        from meridian.vllm.bench.model import model_dir

        self.port, listener = free_port(), free_port()
        self.base, self.listener = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{listener}"
        config = folder / "meridian.toml"
        config.write_text(self.config(listener))
        names = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL")
        env = {name: value for name, value in os.environ.items() if name not in names}
        env |= {"MERIDIAN_CONFIG": str(config), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        command = [str(Path(sys.executable).parent / "vllm"), "serve", str(model_dir()), "--served-model-name", "m"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--max-model-len", "1024"]
        command += ["--block-size", "32", "--enforce-eager", "--reasoning-parser", "qwen3", "--max-num-seqs", "16"]
        command += ["--scheduler-cls", "meridian.vllm.MeridianScheduler"]
        command += ["--logits-processors", "meridian.vllm:BudgetLogitsProcessor", *options]
        self.process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.lines: list[str] = []

    def config(self, listener: int) -> str:
        """Its `meridian.toml`; Meridian listens at this port."""
        return (
            f"[scheduler]\nmin_think_tokens = 0\nmax_think_tokens = {THINK_TOKENS}\n"
            "[scheduler.reasoning_effort]\nlow.max_think_tokens = 9\n"
            "[entropy]\neat_probe_interval_tokens = 8\neat_variance_threshold = 1e-30\nprobe_suffix = 'ans'\n"
            f'[telemetry]\nprometheus = "127.0.0.1:{listener}"\n[admin]\nlisten = ""\n'
        )

    def chat(self, xargs: dict[str, Any], max_tokens: int = 40, **more: Any) -> dict[str, Any]:
        """The answer to one message; the ids of its tokens are asked for as well."""
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "return_token_ids": True,
            "vllm_xargs": xargs,
            **more,
        }
        request = urllib.request.Request(
            f"{self.base}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)

    def metric(self, base: str, name: str) -> float:
        """Sum of the samples of a metric; `name` may carry labels."""
        with urllib.request.urlopen(f"{base}/metrics", timeout=60) as response:
            text = response.read().decode()
        metric, _, labels = name.rstrip("}").partition("{")
        found = re.findall(rf"^{re.escape(metric)}(?:\{{([^}}]*)\}})? (\S+)$", text, re.MULTILINE)
        assert found, f"{metric} is not among the metrics"
        return sum(float(value) for own, value in found if labels in own)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BudgetServer]:
    """A running server."""
    running = BudgetServer(tmp_path_factory.mktemp("serve"), "--distributed-executor-backend", "mp")
    try:
        running.wait_until_ready()
        # A worker of its own says so in what it prints.
        assert any("(Worker" in line for line in running.lines)
        yield running
    finally:
        running.kill()


@pytest.fixture(scope="module")
def end() -> int:
    """The token that ends thinking."""
    from meridian.vllm.bench.model import model_dir
    from transformers import AutoTokenizer

    (token,) = AutoTokenizer.from_pretrained(model_dir()).encode("</think>", add_special_tokens=False)
    return token


def tokens(answer: dict[str, Any]) -> list[int]:
    """What was generated."""
    return answer["choices"][0]["token_ids"]


def test_a_budget_ends_thinking_at_its_token(server: BudgetServer, end: int) -> None:
    free = tokens(server.chat({"meridian_think_off": True}))
    assert end not in free
    for budget in (0, 1, 5, 17):
        generated = tokens(server.chat({"meridian_think_budget": budget}))
        assert generated.index(end) == budget
        assert generated[:budget] == free[:budget]
        assert len(generated) == 40
    assert tokens(server.chat({"meridian_think_off": 1}, THINK_TOKENS + 10)).index(end) == THINK_TOKENS


def test_an_effort_and_vllms_own_budget_end_thinking_as_the_operator_says(server: BudgetServer, end: int) -> None:
    missed = server.metric(server.listener, "meridian_missed_forced_tokens_total")
    cases: tuple[tuple[dict[str, Any], dict[str, Any], int], ...] = (
        ({"reasoning_effort": "low"}, {}, 9),
        ({"reasoning_effort": "low"}, {"meridian_think_budget": 12}, 12),
        # vLLM counts its own budget from the start marker: the template's line end is one of them.
        ({"reasoning_effort": "low", "thinking_token_budget": 5}, {}, 4),
        ({"thinking_token_budget": 5}, {"meridian_think_budget": 3}, 3),
        ({"thinking_token_budget": 7}, {}, 6),
        ({"thinking_token_budget": 0}, {}, 0),
        ({}, {"meridian_reasoning_effort": "low"}, 9),
    )
    for more, xargs, ends in cases:
        generated = tokens(server.chat(xargs, **more))
        assert generated.index(end) == ends, (more, xargs)
        assert generated.count(end) == 1
    assert end not in tokens(server.chat({"meridian_think_off": True}, reasoning_effort="high")), "it has no row"
    assert server.metric(server.listener, "meridian_missed_forced_tokens_total") == missed


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("meridian_think_budget", -1),
        ("meridian_think_budget", "many"),
        ("meridian_think_budgets", 5),
        ("meridian_ema_alpha", 0),
        ("meridian_interrupt", ["x"] * 9),
        ("meridian_row", "key"),
        ("meridian_reasoning_effort", "lo"),
    ],
)
def test_a_bad_value_is_the_clients_mistake(server: BudgetServer, end: int, key: str, value: Any) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.chat({key: value})
    assert refused.value.code == 400
    assert f"{key}: " in json.loads(refused.value.read())["error"]["message"]
    assert tokens(server.chat({"meridian_think_budget": 3})).index(end) == 3


BEAMS = {"use_beam_search": True, "n": 2}


@pytest.mark.parametrize(
    ("field", "xargs", "more"),
    [
        ("use_beam_search", {}, BEAMS),
        ("use_beam_search", {}, BEAMS | {"max_tokens": 10, "reasoning_effort": "low"}),
        ("meridian_think_budget", {"meridian_think_budget": 4}, BEAMS | {"max_tokens": 10}),
        ("allowed_token_ids", {}, {"allowed_token_ids": [40, 41]}),
        ("bad_words", {"meridian_think_budget": 4}, {"bad_words": ["</think>"], "max_tokens": 10}),
        ("logit_bias", {}, {"logit_bias": {"END": -100}}),
    ],
)
def test_a_limit_that_could_not_hold_is_the_clients_mistake(
    server: BudgetServer, end: int, field: str, xargs: dict[str, Any], more: dict[str, Any]
) -> None:
    if "logit_bias" in more:
        more = {"logit_bias": {str(end): -100}}
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.chat(xargs, **{"max_tokens": THINK_TOKENS + 1, **more})
    error = json.loads(refused.value.read())["error"]
    assert (refused.value.code, error["param"]) == (400, field)
    assert error["message"].startswith(f"{field}: ")
    if not xargs:
        assert server.chat(xargs, **{**more, "max_tokens": 9})["choices"], "it cannot reach the limit"


def test_probes_run_and_only_the_clients_requests_are_counted(server: BudgetServer) -> None:
    finished = server.metric(server.base, "vllm:request_success_total")
    done = server.metric(server.listener, 'meridian_probes_total{outcome="done"}')
    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(lambda i: server.chat({"meridian_think_budget": 60 + i}, 100), range(6)))
    assert [len(tokens(answer)) for answer in answers] == [100] * 6
    assert server.metric(server.listener, 'meridian_probes_total{outcome="done"}') > done + 6
    assert server.metric(server.base, "vllm:request_success_total") == finished + 6


def test_it_ends(server: BudgetServer) -> None:
    server.stop()
