"""Starting: what is refused, with which words, and which class is made."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from harness import Engine
from meridian import ConfigError, PolicyError
from meridian.vllm import MeridianScheduler, compat
from meridian.vllm.compat import Place, check_seams, check_version

QUIET = '[admin]\nlisten = ""\n[telemetry]\nprometheus = ""\n'


def make(engine: Engine, *, diffusion_config: Any = None, **scheduler_config: Any) -> Any:
    """Another scheduler for the engine's model, with fields of vLLM's scheduler configuration replaced."""
    stock = engine.scheduler
    vllm_config = copy.copy(stock.vllm_config)
    object.__setattr__(vllm_config, "diffusion_config", diffusion_config)
    vllm_config.scheduler_config = copy.copy(stock.scheduler_config)
    for name, value in scheduler_config.items():
        object.__setattr__(vllm_config.scheduler_config, name, value)
    return MeridianScheduler(
        vllm_config=vllm_config,
        kv_cache_config=stock.kv_cache_config,
        structured_output_manager=stock.structured_output_manager,
        block_size=stock.block_size,
        log_stats=False,
    )


def configure(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    path = folder / "meridian.toml"
    path.write_text(text)
    monkeypatch.setenv("MERIDIAN_CONFIG", str(path))


def test_one_dotted_path_for_both_ways_of_scheduling(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    monkeypatch.delenv("MERIDIAN_CONFIG", raising=False)
    assert not isinstance(make(engine, async_scheduling=False), AsyncScheduler)
    assert isinstance(make(engine, async_scheduling=True), AsyncScheduler)


def test_nothing_configured_is_the_native_default(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("MERIDIAN_CONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert make(engine).meridian_stats()["policy"] == "balanced"


LIMITED = "[scheduler]\nmax_think_tokens = 4096\nend_loops = true\n"


@pytest.mark.parametrize(
    ("text", "has_sampler", "outputs"),
    [
        ("", True, "as vLLM"),
        (LIMITED, True, "thinking ends at 4,096 tokens; loops end"),
        ("[model]\nstop_strings = 'answer'\n", True, "stop strings bind only in the answer"),
        ("", False, "as vLLM"),
        # Without a logits processor, nothing ends any thinking.
        (LIMITED, False, "as vLLM"),
    ],
)
def test_the_start_logs_what_may_change_outputs(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    text: str,
    has_sampler: bool,
    outputs: str,
) -> None:
    from meridian.vllm.speculation import OURS

    configure(monkeypatch, tmp_path, QUIET + text)
    model_config = engine.scheduler.vllm_config.model_config
    monkeypatch.setattr(model_config, "logits_processors", [OURS[0]] if has_sampler else None)
    with caplog.at_level("INFO", logger="vllm.meridian"):
        made = make(engine)
    assert (made._meridian_think is not None) == has_sampler
    made._meridian_use(None)
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "outputs" in line] == [f"meridian: outputs: {outputs}"]


@pytest.mark.parametrize("method", ["_reserve_prefill_lookahead", "_free_request"])
def test_a_vllm_that_lacks_a_method_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    check_seams(engine.scheduler, vllm.__version__)
    monkeypatch.delattr(Scheduler, method)
    with pytest.raises(RuntimeError, match=rf"^vLLM .* is not supported .* lacks {method}\(\)$"):
        check_seams(engine.scheduler, vllm.__version__)
    with pytest.raises(RuntimeError, match=rf"lacks {method}\(\)$"):
        make(engine)


def test_a_vllm_with_another_parameter_or_attribute_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    monkeypatch.setattr(BlockPool, "touch", lambda self, request: None)
    more = (Place("order of running", "running", dict), Place("freed blocks", "kv_cache_manager.pages", int))
    monkeypatch.setattr(compat, "PLACES", (*compat.PLACES, *more))
    places = r"touch\(blocks\); running as dict, it is list; kv_cache_manager\.pages$"
    with pytest.raises(RuntimeError, match=places):
        make(engine)


def test_offloading_that_does_not_say_where_keys_stand_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from meridian.vllm import PhaseAwareCachePolicy
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

    monkeypatch.delattr(CachePolicy, "on_request_finished", raising=False)
    with pytest.raises(RuntimeError, match=r"^PhaseAwareCachePolicy: vLLM .* expected vLLM 0\.31 or newer$"):
        PhaseAwareCachePolicy(4)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_native_fcfs_stands_aside(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy: str) -> None:
    configure(monkeypatch, tmp_path, f'[policy.dispatch]\nsource = "native:fcfs"\n{QUIET}')
    scheduler = make(engine, policy=policy)
    assert scheduler._meridian is not None
    assert scheduler._meridian_stands_aside
    assert scheduler._meridian_kv is scheduler._meridian_think is None
    assert type(scheduler.waiting).__module__ == "vllm.v1.core.sched.request_queue"


def test_a_policy_takes_the_queue_of_priorities_over(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from meridian.vllm.queue import PlannedPriorityQueue
    from vllm.v1.core.sched.request_queue import PriorityRequestQueue

    configure(monkeypatch, tmp_path, QUIET)
    scheduler = make(engine, policy="priority")
    assert isinstance(scheduler.waiting, PlannedPriorityQueue)
    scheduler._meridian_use(None)
    assert type(scheduler.waiting) is PriorityRequestQueue


@pytest.mark.parametrize(("is_async", "own"), [(False, "DiffusionScheduler"), (True, "DiffusionAsyncScheduler")])
@pytest.mark.parametrize("source", ["native:fcfs", "native:output-first"])
def test_a_diffusion_model_keeps_vllms_own_class(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_async: bool, own: str, source: str
) -> None:
    diffusion_scheduler = pytest.importorskip("vllm.v1.core.sched.diffusion_scheduler", reason="vLLM 0.30 has none")
    from vllm.config.diffusion import DiffusionConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import DraftTokenIds

    configure(monkeypatch, tmp_path, f'[policy.dispatch]\nsource = "{source}"\n{QUIET}')
    scheduler = make(engine, async_scheduling=is_async, diffusion_config=DiffusionConfig(canvas_length=8))
    if not hasattr(diffusion_scheduler, "DiffusionScheduler"):
        # vLLM 0.31 has a class of its own for asynchronous scheduling only, and pads no canvas.
        expected = diffusion_scheduler.DiffusionAsyncScheduler if is_async else Scheduler
        assert isinstance(scheduler, expected)
        assert isinstance(scheduler, AsyncScheduler) == is_async
        assert scheduler._meridian_think_kept is None
        return
    assert isinstance(scheduler, getattr(diffusion_scheduler, own))
    # What is the class's own is done: a canvas that was padded is cut to the width that the request asked for.
    request = SimpleNamespace(
        request_id="r",
        sampling_params=SimpleNamespace(extra_args={"diffusion_canvas_length": 4}),
        is_finished=lambda: True,
    )
    scheduler.requests["r"] = request
    drafts = DraftTokenIds(["r"], [[1, 2, 3, 4, 5, 6, 7, 8]])
    scheduler.update_draft_token_ids(drafts)
    assert drafts.draft_token_ids == [[1, 2, 3, 4]]
    assert scheduler._meridian_think_kept is None


def test_a_scheduler_that_was_not_started_is_stock(engine: Engine) -> None:
    from meridian.vllm.scheduler import AsyncMeridianScheduler, SyncMeridianScheduler

    for implementation in (SyncMeridianScheduler, AsyncMeridianScheduler):
        scheduler: Any = object.__new__(implementation)
        own = {name: value for name, value in vars(engine.scheduler).items() if "_meridian" not in name}
        vars(scheduler).update(own)
        assert scheduler.schedule().total_num_scheduled_tokens == 0
        assert scheduler.meridian_stats() == {}
        assert scheduler.meridian_take_signals() == []


def test_mistakes_end_the_start_with_one_line(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    configure(monkeypatch, tmp_path, "[scheduler]\noutput_tpot_budget_ms = 0\n")
    with pytest.raises(ConfigError, match=r"scheduler\.output_tpot_budget_ms: 0: must be above 0"):
        make(engine)
    configure(monkeypatch, tmp_path, '[policy.dispatch]\nsource = "absent.wasm"\n')
    with pytest.raises(PolicyError, match=r"policy\.dispatch\.source: .*absent\.wasm: cannot read"):
        make(engine)
    configure(monkeypatch, tmp_path, "[model]\nfamily = 'qwen4'\n")
    with pytest.raises(ConfigError, match=r'model\.family: "qwen4": unknown model family, did you mean "qwen3"'):
        make(engine)


@pytest.mark.parametrize("version", ["0.30.0", "0.31.2", "0.32.0+cpu", "0.33.1rc1"])
def test_supported_versions(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.29.0", "0.34.0", "1.0", "dev", ""])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(RuntimeError, match=r"is not supported by this Meridian, expected 0\.30 to 0\.33"):
        check_version(version)
