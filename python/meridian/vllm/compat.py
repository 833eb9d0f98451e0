"""Which vLLM this works with: its version, and every place of it that Meridian uses.

None of these places is a public interface. Meridian looks them up when an engine starts. It refuses a vLLM in which one
has moved, with one line, so that no step fails for it.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

SUPPORTED = ((0, 30), (0, 33))

# Methods that Meridian overrides, wraps or calls, with the parameters it relies on. Paths begin at the scheduler.
METHODS: dict[str, tuple[str, ...]] = {
    "schedule": (),
    "update_from_output": ("scheduler_output", "model_runner_output"),
    "add_request": ("request",),
    "finish_requests": ("request_ids", "finished_status"),
    "make_stats": (),
    "shutdown": (),
    "_preempt_request": ("request",),
    "_free_request": ("request",),
    "_handle_blocked_waiting_request": ("request",),
    "_select_waiting_queue_for_scheduling": (),
    "_reserve_prefill_lookahead": ("request", "num_computed_tokens", "num_new_tokens"),
    "kv_cache_manager.allocate_slots": ("request", "num_new_tokens"),
    "kv_cache_manager.get_computed_blocks": ("request",),
    "kv_cache_manager.free": ("request",),
    "kv_cache_manager.block_pool.free_blocks": ("ordered_blocks",),
    "kv_cache_manager.block_pool.get_new_blocks": ("num_blocks",),
    "kv_cache_manager.block_pool.touch": ("blocks",),
    "kv_cache_manager.block_pool.evict_blocks": ("block_ids",),
    "kv_cache_manager.block_pool.reset_prefix_cache": (),
    "kv_cache_manager.block_pool.get_num_free_blocks": (),
    "kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks": (),
    "kv_cache_manager.block_pool.free_block_queue.remove": ("block",),
    "kv_cache_manager.block_pool.free_block_queue.prepend_n": ("blocks",),
    "waiting.remove_request": ("request",),
    "waiting.prepend_request": ("request",),
}
# Methods that only some of the supported versions have; without them Meridian does what it says where it uses them.
SINCE = {"_handle_blocked_waiting_request": (0, 31)}
# Methods that later versions do not have; `SINCE` names what they have in the place of these.
UNTIL = {"_select_waiting_queue_for_scheduling": (0, 30)}
# Attributes that are read or set, with what they are.
ATTRIBUTES: dict[str, type] = {
    "running": list,
    "requests": dict,
    "waiting": object,
    "policy": object,
    "connector": object,
    "lora_config": object,
    "vllm_config": object,
    "cache_config": object,
    "max_num_scheduled_tokens": int,
    "max_num_running_reqs": int,
    "max_model_len": int,
    "num_spec_tokens": int,
    "num_lookahead_tokens": int,
    "num_waiting_for_streaming_input": int,
    "need_mamba_block_aligned_split": bool,
    "block_size": int,
    "scheduler_config.enable_chunked_prefill": bool,
    "scheduler_config.disable_chunked_mm_input": bool,
    "scheduler_config.async_scheduling": bool,
    "kv_cache_manager.enable_caching": bool,
    "kv_cache_manager.coordinator.single_type_managers": tuple,
    "kv_cache_manager.block_pool.blocks": list,
    "kv_cache_manager.block_pool.num_gpu_blocks": int,
    "kv_cache_manager.block_pool.free_block_queue.num_free_blocks": int,
}


def admitted_first(scheduler: Any) -> Any:
    """vLLM's second queue, from which it admits before `waiting` and in its own order: requests that hold KV blocks
    (`kv_holding_waiting`), or before vLLM 0.31 those that could not be admitted in an earlier step (`skipped_waiting`).
    """
    return getattr(scheduler, admitted_first_name(scheduler))


def admitted_first_name(scheduler: Any) -> str:
    """The name of the queue that `admitted_first` returns."""
    return "kv_holding_waiting" if hasattr(scheduler, "kv_holding_waiting") else "skipped_waiting"


def check_version(version: str) -> None:
    """Refuse a vLLM whose scheduler this was not written against: its seams are not a public interface.

    Raises:
        RuntimeError: names the version and what is supported.
    """
    release = _release(version)
    if release is None or not SUPPORTED[0] <= release <= SUPPORTED[1]:
        low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
        raise RuntimeError(f"vLLM {version} is not supported by this Meridian, expected {low} to {high}")


def check_seams(scheduler: Any, version: str) -> None:
    """Refuse a vLLM in which a place that Meridian uses is missing, or is something else.

    Raises:
        RuntimeError: names the version and the places.
    """
    release = _release(version) or SUPPORTED[1]
    methods = {
        path: names
        for path, names in METHODS.items()
        if SINCE.get(path, SUPPORTED[0]) <= release <= UNTIL.get(path, SUPPORTED[1])
    }
    moved = [*_moved_methods(scheduler, methods), *_moved_attributes(scheduler)]
    if moved:
        raise RuntimeError(f"vLLM {version} is not supported by this Meridian: its scheduler lacks {'; '.join(moved)}")


def _release(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def _at(scheduler: Any, path: str) -> Any:
    found = scheduler
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _method_at(scheduler: Any, path: str) -> Any:
    """As `_at`; a method of the scheduler itself is vLLM's own, not the one that overrides it."""
    if "." in path:
        return _at(scheduler, path)
    own = (base for base in type(scheduler).__mro__ if base.__module__.startswith("vllm."))
    for base in own:
        if path in base.__dict__:
            return base.__dict__[path]
    raise AttributeError(path)


def _moved_methods(scheduler: Any, methods: dict[str, tuple[str, ...]]) -> list[str]:
    moved = []
    for path, parameters in methods.items():
        try:
            found = inspect.signature(_method_at(scheduler, path)).parameters
        except (AttributeError, TypeError, ValueError):
            moved.append(f"{path}()")
            continue
        takes_all = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in found.values())
        missing = [] if takes_all else [name for name in parameters if name not in found]
        if missing:
            moved.append(f"{path}({', '.join(missing)})")
    return moved


def _moved_attributes(scheduler: Any) -> list[str]:
    moved = []
    for path, kind in ATTRIBUTES.items():
        try:
            found = _at(scheduler, path)
        except AttributeError:
            moved.append(path)
            continue
        if not isinstance(found, kind):
            moved.append(f"{path} as {kind.__name__}, it is {type(found).__name__}")
    return moved
