"""The parts of Meridian in a scheduler: the native engine, and the hook that ends thinking."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.request_queue import SchedulingPolicy

from meridian import _native
from meridian.config import MeridianConfig
from meridian.vllm.markers import engine_tokenizer, resolve
from meridian.vllm.speculation import is_ours
from meridian.vllm.template import reasoning_in_template
from meridian.vllm.thinking import ThinkHook

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler

    from meridian.vllm.channel import ToSamplers
    from meridian.vllm.seams import Seams

# Below vLLM's own logger, whose handlers and level it shares.
logger = logging.getLogger("vllm.meridian")


def make_engine(config: MeridianConfig, scheduler: Scheduler, *, serves: bool = False) -> _native.Engine:
    """Make the native engine for this scheduler; with `serves`, its listeners too."""
    vllm_config = scheduler.vllm_config
    tokenizer = engine_tokenizer(vllm_config.model_config)
    # The first call logs where the markers come from; the second one knows what begins a tool call in the template.
    config = replace(config, model=resolve(config.model, tokenizer, vllm_config).model)
    config = with_template(config, tokenizer)
    markers = resolve(config.model, tokenizer, vllm_config, quiet=True)
    rank, size = data_parallel(vllm_config)
    return _native.Engine(
        config.to_json(),
        config.base_dir,
        markers=markers,
        block_tokens=scheduler.block_size,
        state_block=scheduler.cache_config.block_size if scheduler.need_mamba_block_aligned_split else None,
        steps_ahead=1 if vllm_config.scheduler_config.async_scheduling else 0,
        model=vllm_config.model_config.model,
        serves=serves,
        priority_first=scheduler.policy is SchedulingPolicy.PRIORITY,
        dp_rank=rank,
        dp_size=size,
        config_file=config.config_file,
    )


def data_parallel(vllm_config: VllmConfig) -> tuple[int, int | None]:
    """The rank of this engine, and the number of ranks if vLLM says so.

    Ranks of a dense model are independent engines: vLLM then sets rank and size to those of a single engine, and keeps
    only the index.
    """
    parallel = vllm_config.parallel_config
    rank = max(int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)), 0)
    size = int(parallel.data_parallel_size)
    return rank, size if size > max(rank, 1) else None


def make_think_hook(
    scheduler: Scheduler, seams: Seams, engine: _native.Engine, samplers: ToSamplers
) -> ThinkHook | None:
    """Make the hook that ends thinking; None without markers or without a `BudgetLogitsProcessor`."""
    config = MeridianConfig.from_native(engine.config_json, engine.base_dir)
    tokenizer = engine_tokenizer(scheduler.vllm_config.model_config)
    markers = resolve(config.model, tokenizer, scheduler.vllm_config, quiet=True)
    if tokenizer is None or not markers.ends:
        samplers.configure(config.model)
        return None
    if not any(map(is_ours, scheduler.vllm_config.model_config.logits_processors or ())):
        logger.info(
            "meridian: no thinking budgets: vLLM was not given --logits-processors meridian.vllm:BudgetLogitsProcessor"
        )
        return None
    return ThinkHook(scheduler, seams, engine, config, tokenizer, markers, samplers)


def with_template(config: MeridianConfig, tokenizer: Any) -> MeridianConfig:
    """The configuration, completed from the model's chat template if nothing says how it treats earlier reasoning."""
    model = config.model
    said = model.family or model.strips_reasoning != "auto" or config.kv_memory.evict_dead_thinking != "auto"
    first = [text if isinstance(text, str) else (text or [""])[0] for text in (model.think_start, model.think_end)]
    if said or not all(first):
        return config
    found = reasoning_in_template(tokenizer, *first, tool_calls=model.tool_call or _native.tool_call_texts())
    logger.info("meridian: the chat template %s", found.shown)
    # A configured text stays, even if the template cannot render a tool loop.
    tool_call = model.tool_call or found.tool_calls
    return replace(config, model=replace(model, strips_reasoning=found.strips, tool_call=tool_call))
