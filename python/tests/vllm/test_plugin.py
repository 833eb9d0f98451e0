"""`MeridianSchedulerPlugin`: into a stock engine between two steps, and out again. In a process of its own, because the
engine of the other tests has Meridian from the start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, random, sys
from meridian.vllm.bench.run import Options, build
from meridian.vllm.bench.model import model_dir
from meridian.vllm.bench.request import TraceRequest

sizes = {"kv_blocks": 48, "max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 1024}
options = Options(model_dir(), dtype="float32", **sizes)
run = build(options)
import meridian
from meridian.vllm_plugin import MeridianSchedulerPlugin

scheduler = run.scheduler
own, attributes = type(scheduler), set(scheduler.__dict__)


def generate(each_step):
    rng = random.Random(0)
    sizes = random.Random(1)
    run.seen.clear(), run.by_name.clear()
    assert scheduler.reset_prefix_cache()
    shapes = [TraceRequest(0.0, sizes.randint(20, 120), sizes.randint(20, 60), sizes.randint(4, 60)) for _ in range(24)]
    seen = [run.add(str(i), shape, i, 0.0, rng) for i, shape in enumerate(shapes)]
    steps = 0
    while run.engine.has_unfinished_requests():
        each_step(steps)
        run.step()
        steps += 1
    return [s.tokens for s in seen]


stock = generate(lambda step: None)
config = meridian.load_config(sys.argv[1])
plugin = MeridianSchedulerPlugin(scheduler=scheduler, config=config)
found = {}


def in_and_out(step):
    if step == 12:
        plugin.attach()
        live = [r for r in scheduler.requests.values()]
        found["phases"] = sorted({scheduler._meridian.phase(r.request_id) for r in live})
        found["taken_over"] = scheduler.meridian_stats()["requests"] == len(live)
        for request in scheduler.running:
            tokens = scheduler._meridian.think_from(request.request_id)
            assert tokens is None or tokens >= request.num_prompt_tokens
        try:
            MeridianSchedulerPlugin(scheduler=scheduler, config=config).attach()
        except RuntimeError as error:
            found["twice"] = str(error)
    if step == 60:
        found["decisions"] = scheduler.meridian_stats()["decisions"]
        plugin.detach()
        plugin.detach()


changed = generate(in_and_out)
found["same_tokens"] = changed == stock
found["own_class"] = type(scheduler) is own
found["left"] = sorted(set(scheduler.__dict__) - attributes)
manager = scheduler.kv_cache_manager
found["wrapped"] = sorted(
    name for owner in (manager, manager.block_pool) for name in owner.__dict__ if callable(owner.__dict__[name])
)
found["again"] = generate(lambda step: None) == stock
bad = meridian.load_config(sys.argv[2])
try:
    MeridianSchedulerPlugin(scheduler=scheduler, config=bad).attach()
except Exception as error:
    found["refused"] = str(error)
found["own_class_after_refusal"] = type(scheduler) is own
print(json.dumps(found))
"""


def test_in_and_out_while_requests_run(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text("[model]\nstrips_reasoning = true\n[admin]\nlisten = ''\n[telemetry]\nprometheus = ''\n")
    bad.write_text("[policy.eviction]\nsource = 'missing.wasm'\n")
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(good), str(bad)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("decisions") > 30
    assert found.pop("phases")
    assert "missing.wasm" in found.pop("refused")
    assert found == {
        "taken_over": True,
        "twice": "Meridian is in this scheduler already",
        "same_tokens": True,
        "own_class": True,
        "left": [],
        "wrapped": [],
        "again": True,
        "own_class_after_refusal": True,
    }


ONE_CONFIGURATION = """
import json, os, sys
from meridian.vllm.bench.run import Options, build
from meridian.vllm.bench.model import model_dir

os.environ["MERIDIAN_CONFIG"] = sys.argv[1]
sizes = {"kv_blocks": 48, "max_num_seqs": 4, "max_num_batched_tokens": 256, "max_model_len": 512}
run = build(Options(model_dir(), logits_processors=("meridian.vllm:BudgetLogitsProcessor",), **sizes))
import meridian
from meridian.vllm_plugin import MeridianSchedulerPlugin
from vllm import SamplingParams

tokenizer = run.engine.get_tokenizer()
prompt = list(tokenizer.encode("Please think. <think>\\n", add_special_tokens=False))
sent = 0


def ending(budget):
    # What stands behind the first `budget` tokens of thinking.
    global sent
    sent += 1
    params = SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=40, extra_args={"meridian_think_budget": budget}
    )
    run.engine.add_request(str(sent), {"prompt_token_ids": prompt}, params)
    tokens = []
    while run.engine.has_unfinished_requests():
        for output in run.engine.step():
            tokens = list(output.outputs[0].token_ids)
    return tokenizer.decode(tokens[budget:])


plugin = MeridianSchedulerPlugin(scheduler=run.scheduler, config=meridian.load_config(sys.argv[2]))
found = [ending(5)]
plugin.attach()
found.append(ending(7))
found.append(run.scheduler.meridian_stats()["budget"]["forced"]["hard-cap"])
plugin.detach()
found.append(ending(3))
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("of_the_file", "ending"),
    [
        ("force_phrase = 'Says the file.</think>'\n", "Says the file.</think>"),
        # By its own file the model does not think at all.
        ("think_start = ''\nthink_end = ''\n", None),
    ],
)
def test_samplers_go_by_the_plugins_configuration(tmp_path: Path, of_the_file: str, ending: str | None) -> None:
    file, plugin = tmp_path / "file.toml", tmp_path / "plugin.toml"
    quiet = "[admin]\nlisten = ''\n[telemetry]\nprometheus = ''\n"
    file.write_text(quiet + "[model]\n" + of_the_file)
    plugin.write_text(
        quiet
        + "[scheduler]\nmin_think_tokens = 0\n[entropy]\nenabled = false\n"
        + "[model]\nthink_start = '<think>'\nthink_end = 'so much for that'\n"
        + "force_phrase = 'Says the plugin, so much for that'\n"
    )
    command = [sys.executable, "-c", ONE_CONFIGURATION, str(file), str(plugin)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    before, attached, forced, after = json.loads(done.stdout.splitlines()[-1])
    assert attached.startswith("Says the plugin, so much for that")
    assert forced == 1
    for alone in (before, after):
        assert "Says the plugin" not in alone
        assert ending is None or alone.startswith(ending)
        assert ending is not None or "Says the file" not in alone
