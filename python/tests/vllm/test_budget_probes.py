"""Probes run beside requests in the real engine and leave no trace: not in outputs, statistics or KV memory.

Each engine is in a process of its own: these have a logits processor, unlike the one that the other tests share.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import fresh
import meridian.budget
import pytest

ROOT = Path(__file__).resolve().parents[3]
PROBE = "meridian-probe-"
SUFFIX = ("\n", "</think>", "\n\n")
CONFIG = """
[scheduler]
min_think_tokens = 100000
max_think_tokens = 100000
# So that how long the machine takes decides nothing: neither what a step holds, nor whether there is room for a probe.
# The default paces prompts by step times whatever the targets are.
output_tpot_budget_ms = 1e9
think_tpot_budget_ms = 1e9
max_defer_ms = 1e9
[policy.dispatch]
source = "native:output-first"
[kv_memory]
growth_blocks = 0
[entropy]
eat_probe_interval_tokens = 8
# So that the entropy of each token is measured.
rpdi_threshold = 2.0
probe_newline = true
probe_suffix = "\\n\\n"
[telemetry]
prometheus = ""
[admin]
listen = ""
"""

SCRIPT = """
import json, os, random, struct, sys
from collections import Counter, defaultdict

from checks.engine import cpu
from meridian.vllm.bench.run import ENVIRONMENT, MERIDIAN_CLASS

scheduling, blocks, kind, count = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
os.environ.update(ENVIRONMENT)
if scheduling == "v2":
    cpu.use_runner_v2()
if scheduling != "sync":
    cpu.install(asynchronous=True)
from meridian.vllm.bench.model import model_dir
from meridian import kernels

from vllm import SamplingParams
from meridian.vllm import thinking
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

args = EngineArgs(
    model=str(model_dir()), dtype="float32", max_model_len=512, block_size=32, num_gpu_blocks_override=blocks,
    max_num_seqs=24, max_num_batched_tokens=192, enforce_eager=True, scheduler_cls=MERIDIAN_CLASS,
    logits_processors=["meridian.vllm:BudgetLogitsProcessor"], disable_log_stats=False,
    enable_prefix_caching="uncached" not in kind,
    kv_transfer_config=KVTransferConfig(
        kv_connector="Watcher", kv_role="kv_both", kv_connector_module_path="kv_watcher"
    ) if "connector" in kind else None,
)
engine = LLMEngine.from_engine_args(args)
scheduler = engine.engine_core.engine_core.scheduler
# As vLLM has it where several engines serve together: clients are told who has finished.
scheduler.finished_req_ids_dict = defaultdict(set)
pool = scheduler.kv_cache_manager.block_pool
tokenizer = engine.get_tokenizer()
tail = list(tokenizer.encode("<think>\\n", add_special_tokens=False))
PROBE = "meridian-probe-"
facts, seen = Counter(), {"wrong": []}
schedule, update = scheduler.schedule, scheduler.update_from_output


def probes(names):
    return [name for name in names if name.startswith(PROBE)]


def watched_schedule(*args, **kwargs):
    answers = [r.request_id for r in scheduler.running if scheduler._meridian.phase(r.request_id) == "output"]
    output = schedule(*args, **kwargs)
    facts["preemptions"] += len(output.preempted_req_ids or ())
    for new in output.scheduled_new_reqs:
        request = scheduler.requests[new.req_id]
        facts["chunks"] += request.num_computed_tokens < request.num_tokens
    if any(name.startswith(PROBE) for name in output.num_scheduled_tokens):
        facts["steps with probes"] += 1
        facts["answers beside probes"] += len(answers)
        # In an asynchronous engine one may have all of its tokens under way.
        left = [
            name for name in answers
            if name in scheduler.requests and name not in output.num_scheduled_tokens
            and scheduler.requests[name].num_output_placeholders + scheduler.requests[name].num_output_tokens
            < scheduler.requests[name].max_tokens
        ]
        if left:
            seen["wrong"].append(f"answers without tokens beside a probe: {left}")
        if output.preempted_req_ids:
            seen["wrong"].append(f"preempted beside a probe: {output.preempted_req_ids}")
    return output


def watched_update(*args, **kwargs):
    outputs = update(*args, **kwargs)
    for client in outputs.values():
        facts["outputs"] += len(client.outputs)
        facts["told of as finished"] += len(client.finished_requests or ())
        told = probes([*(o.request_id for o in client.outputs), *(client.finished_requests or ())])
        if told:
            seen["wrong"].append(f"told of probes: {told}")
        stats = client.scheduler_stats
        if stats is not None:
            facts["stats"] += 1
            own = [r for r in scheduler.running if not r.request_id.startswith(PROBE)]
            waiting = [r for r in scheduler.waiting if not r.request_id.startswith(PROBE)]
            if (stats.num_running_reqs, stats.num_waiting_reqs) != (len(own), len(waiting)):
                seen["wrong"].append(f"{stats.num_running_reqs} run, {stats.num_waiting_reqs} wait: "
                                     f"{len(own)}, {len(waiting)} expected")
            cache = stats.prefix_cache_stats
            for name in ("requests", "queries", "hits", "preempted_requests"):
                facts[name] += getattr(cache, name)
    for name in probes(scheduler.requests):
        facts["under way after a step"] += 1
        of = scheduler.requests.get(name[len(PROBE):].partition("-")[2])
        if of is None or scheduler._meridian.phase(of.request_id) != "think":
            seen["wrong"].append(f"{name} goes on although its request does not think")
    return outputs


scheduler.schedule, scheduler.update_from_output = watched_schedule, watched_update


told = Counter()
reports_in = thinking.reports_in


def watched_reports(output):
    reports = reports_in(output)
    for report in reports:
        # Report: what, key, token, entropy, tokens ahead, confidence.
        for what, key, token, *_ in struct.iter_unpack("<BQIfBf", report):
            told[what, key, token] += what != 2
    return reports


thinking.reports_in = watched_reports


def generate(record):
    told.clear()
    facts.clear()
    seen["wrong"].clear()
    assert scheduler.reset_prefix_cache()
    free = pool.get_num_free_blocks()
    before = scheduler.meridian_stats()["budget"]
    scheduler.meridian_record_signals(record)
    rng = random.Random(3)
    shared = [rng.randrange(20, 900) for _ in range(64)]
    asked, names, tokens = {}, {}, {}
    for i in range(count):
        prompt = shared * (i % 4 == 0) + [rng.randrange(20, 900) for _ in range(rng.randint(20, 110))] + tail
        # Two of three come to an answer.
        extra = {} if i % 3 == 0 else {"meridian_think_budget": rng.randint(10, 40)}
        if not record:
            extra["meridian_think_off"] = True
        asked[str(i)] = prompt, SamplingParams(
            temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=rng.randint(20, 90), extra_args=extra)
    waiting = iter(asked.items())
    live = 0
    while True:
        while live < 18 and (following := next(waiting, None)) is not None:
            name, (prompt, params) = following
            names[engine.add_request(name, {"prompt_token_ids": prompt}, params)] = name
            live += 1
        if not live:
            break
        for output in engine.step():
            if output.request_id not in asked:
                seen["wrong"].append(f"an answer for {output.request_id}")
            tokens[output.request_id] = list(output.outputs[0].token_ids)
            live -= output.finished
    # What is in flight comes in.
    while engine.engine_core.engine_core.scheduler.has_requests():
        engine.step()
    think = scheduler._meridian_think
    after = scheduler.meridian_stats()["budget"]
    return {
        "prompts": {name: prompt for name, (prompt, _) in asked.items()},
        "tokens": tokens,
        "wrong": list(seen["wrong"]),
        "facts": dict(facts),
        "held": free - pool.get_num_free_blocks(),
        "left": [*scheduler.requests, *(r.request_id for r in scheduler.running)],
        "running": think.running,
        "offered": len(think._offered),
        "probes": {name: after["probes"][name] - before["probes"][name] for name in after["probes"]},
        "probe_tokens": after["probe_tokens"] - before["probe_tokens"],
        "missed": after["missed"] - before["missed"],
        "signals": [(names[s[0]], *s[1:]) for s in scheduler.meridian_take_signals()],
        "connector": dict(Counter(connector.seen)) if (connector := scheduler.connector) else None,
        "most reports of a token": max(told.values(), default=0),
        "tokens reported": len(told),
        "chunks": facts["chunks"],
        "patched": [n for n in vars(scheduler.kv_cache_manager) if n in ("record_prefix_cache_stats",)],
    }


found = {"without": generate(False), "with": generate(True), "scheduler": type(scheduler).__name__}
found["launches"] = kernels.launches()
print(json.dumps(found))
"""


CONNECTOR = """
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class Watcher(KVConnectorBase_V1):
    # Stores and loads nothing; notes what it is told of.
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def _note(self, name, what):
        self.seen.append(("probe " if name.startswith("meridian-probe-") else "request ") + what)

    def on_new_request(self, request):
        is_probe = request.request_id.startswith("meridian-probe-")
        self.seen.append("probe new" if is_probe else "new request")

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self._note(request.request_id, "looked up")
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self._note(request.request_id, "allocated")

    def build_connector_meta(self, scheduler_output):
        for new in scheduler_output.scheduled_new_reqs:
            self._note(new.req_id, "scheduled")
        for name in scheduler_output.num_scheduled_tokens:
            self._note(name, "computed")
        for name in scheduler_output.finished_req_ids:
            self._note(name, "told as finished")
        assert scheduler_output.total_num_scheduled_tokens == sum(scheduler_output.num_scheduled_tokens.values())
        return KVConnectorMetadata()

    def request_finished(self, request, block_ids):
        self._note(request.request_id, "finished")
        return False, None

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass
"""


def observe(tmp_path: Path, scheduling: str, blocks: int, kind: str) -> dict[str, Any]:
    """Run the requests without probes and with them."""
    (tmp_path / "meridian.toml").write_text(CONFIG)
    (tmp_path / "kv_watcher.py").write_text(CONNECTOR)
    environment = {**os.environ, "MERIDIAN_CONFIG": str(tmp_path / "meridian.toml"), "PYTHONPATH": str(tmp_path)}
    arguments = (scheduling, str(blocks), kind, str(REQUESTS[scheduling]))
    if scheduling == "v2":
        # The interpreter of its kernels is chosen before vLLM is imported.
        environment["PYTHONPATH"] += f":{ROOT}"
        command = [sys.executable, "-c", SCRIPT, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    else:
        done = fresh.run(None, *arguments, code=SCRIPT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


ENGINES = [
    "sync-160-cached",
    "sync-56-cached",
    "async-160-cached",
    pytest.param("sync-160-uncached", marks=pytest.mark.exhaustive),
    pytest.param("sync-56-uncached", marks=pytest.mark.exhaustive),
    pytest.param("async-160-uncached", marks=pytest.mark.exhaustive),
    "sync-160-connector",
    pytest.param("sync-56-connector-uncached", marks=pytest.mark.exhaustive),
    pytest.param("v2-160-cached", marks=pytest.mark.exhaustive),
]
# Interpreted kernels are slow.
REQUESTS = {"sync": 30, "async": 30, "v2": 12}


@pytest.fixture(scope="module", params=ENGINES)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an engine with plenty of KV blocks, or with too few, has done: with and without prefix caching, and beside a
    KV connector."""
    scheduling, blocks, kind = request.param.split("-", 2)
    if scheduling == "v2":
        fresh.skip_without_cpu_runner_v2()
    seen = observe(tmp_path_factory.mktemp("probes"), scheduling, int(blocks), kind)
    assert seen["scheduler"] == f"{'Sync' if scheduling == 'sync' else 'Async'}MeridianScheduler"
    seen["requests"] = REQUESTS[scheduling]
    seen["is_scarce"] = blocks == "56"
    seen["kind"] = kind
    return seen


def test_outputs_are_those_without_probes(found: dict[str, Any]) -> None:
    assert found["without"]["probes"] == {"asked": 0, "done": 0, "dropped": 0}
    assert found["with"]["probes"]["done"] > 10
    assert found["with"]["tokens"] == found["without"]["tokens"]
    assert found["with"]["missed"] == 0


def test_entropies_are_measured_by_the_kernels_and_nothing_else(found: dict[str, Any]) -> None:
    (backend,) = found["launches"]
    assert backend.startswith("cpu-")
    # One more finds out at the start what there is.
    assert found["launches"][backend] > found["with"]["facts"]["steps with probes"]


def test_nobody_sees_a_probe(found: dict[str, Any]) -> None:
    facts, without = found["with"]["facts"], found["without"]["facts"]
    assert facts["steps with probes"] > 5
    assert facts["answers beside probes"] > 5
    assert facts["stats"] > 20
    assert facts["told of as finished"] >= found["requests"]
    assert (facts["preemptions"] > 0) == found["is_scarce"]
    assert found["with"]["wrong"] == []
    assert found["without"]["wrong"] == []
    own = facts["requests"] - facts.get("preempted_requests", 0)
    assert own == without["requests"] - without.get("preempted_requests", 0)
    if not found["is_scarce"]:
        assert (without["hits"] > 0) == ("uncached" not in found["kind"])
        assert [facts[name] for name in ("queries", "hits")] == [without[name] for name in ("queries", "hits")]


def test_a_probe_computes_little_more_than_its_suffix(found: dict[str, Any]) -> None:
    run = found["with"]
    # A block of 32 tokens may be open, and the suffix has 3.
    assert 0 < run["probe_tokens"] <= (32 + 3) * (run["probes"]["done"] + run["probes"]["dropped"])


def test_a_connector_sees_every_request_and_no_probe(found: dict[str, Any]) -> None:
    if "connector" not in found["kind"]:
        assert found["with"]["connector"] is None
        return
    for run in (found["with"], found["without"]):
        seen = run["connector"]
        assert seen["new request"] >= 30
        assert seen["request finished"] >= 30
        assert seen["request scheduled"] >= 30
        assert seen["request allocated"] >= 30
        assert not any(what.startswith("probe") for what in seen), seen


def test_a_prompt_in_chunks_reports_its_first_token_once(found: dict[str, Any]) -> None:
    run = found["with"]
    assert run["chunks"] > 3
    assert run["tokens reported"] > 100
    # A token that was sampled and lost to a preemption is sampled again.
    assert run["most reports of a token"] == 1 or found["is_scarce"]


def test_nothing_is_left_of_a_probe(found: dict[str, Any]) -> None:
    for run in (found["with"], found["without"]):
        assert (run["held"], run["left"], run["running"], run["offered"], run["patched"]) == (0, [], 0, 0, [])
    probes = found["with"]["probes"]
    assert probes["asked"] == probes["done"] + probes["dropped"]


def test_entropies_and_confidences_are_those_of_the_model_itself(found: dict[str, Any]) -> None:
    import torch
    from meridian.vllm.bench.model import model_dir
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    suffix = [token for part in SUFFIX for token in tokenizer.encode(part, add_special_tokens=False)]
    run = found["with"]
    probed = [signal for signal in run["signals"] if signal[2] is not None]
    assert len(probed) == run["probes"]["done"]
    for name, thought, bits, answer, _, confidence in probed[::3]:
        prefix = [*run["prompts"][name], *run["tokens"][name][:thought], *suffix]
        with torch.inference_mode():
            logits = model(torch.tensor([prefix])).logits[0, -1].double()
        expected = float(torch.special.entr(logits.softmax(-1)).sum())
        assert abs(bits * math.log(2) - expected) < 1e-4, f"{name} at {thought}"
        assert logits[answer] > logits.max() - 1e-4, f"{name} at {thought}: {answer}"
        assert confidence == pytest.approx(float(logits.softmax(-1).max()), abs=1e-5), f"{name} at {thought}"


def test_probes_come_at_their_interval_and_only_while_a_request_thinks(found: dict[str, Any]) -> None:
    run = found["with"]
    for name, thought, bits, *_ in run["signals"]:
        assert thought <= len(run["tokens"][name])
        if bits is not None:
            assert thought >= 8
    by_request = defaultdict(list)
    for name, thought, bits, *_ in run["signals"]:
        if bits is not None:
            by_request[name].append((thought, bits))
    for probed in by_request.values():
        gaps = [later[0] - before[0] for before, later in pairwise(probed)]
        assert all(gap >= 8 for gap in gaps)
        mean, variance = probed[0][1], 0.0
        means, variances = meridian.budget.eat([bits for _, bits in probed], 0.1)
        for i, (_, bits) in enumerate(probed):
            if i:
                mean = 0.1 * bits + 0.9 * mean
                variance = 0.1 * (bits - mean) ** 2 + 0.9 * variance
            assert means[i] == pytest.approx(mean, abs=1e-9)
            assert variances[i] == pytest.approx(variance, abs=1e-9)
    assert max(map(len, by_request.values())) >= 3
