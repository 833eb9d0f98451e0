"""Which vLLM this works with: its version, and every place of it that Meridian uses.

None of these places is a public interface. Meridian looks them up when an engine starts. It refuses a vLLM in which one
has moved, with one line, so that no step fails for it.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from meridian.vllm.seams import Seams

# Below vLLM's own logger, whose handlers and level it shares.
logger = logging.getLogger("vllm.meridian")

Release = tuple[int, int]
SUPPORTED: tuple[Release, Release] = ((0, 30), (0, 33))

Seam = Literal[
    "steps",
    "requests",
    "order of running",
    "order of waiting",
    "budget",
    "cap",
    "victim",
    "admission",
    "freed blocks",
    "probes",
    "shape",
]


@dataclass(frozen=True)
class Place:
    """A place of vLLM that Meridian uses: a method that it overrides, wraps or calls, or an attribute."""

    seam: Seam
    # From the scheduler on.
    path: str
    # The parameters of a method that Meridian relies on, or the class of an attribute.
    needs: tuple[str, ...] | type
    since: Release = SUPPORTED[0]
    until: Release = SUPPORTED[1]
    # What later versions have instead.
    later: str = ""
    # In a pull request to vLLM (#51601) and in no release: it is used where it is, and not expected.
    is_draft: bool = False


_MANAGER, _POOL = "kv_cache_manager", "kv_cache_manager.block_pool"
_VICTIM = "scheduler_plugin_manager.preemption_plugin"
_WAITING = "scheduler_plugin_manager.queue_sort_plugin"

PLACES = (
    Place("steps", "schedule", ()),
    Place("steps", "update_from_output", ("scheduler_output", "model_runner_output")),
    Place("steps", "make_stats", ()),
    Place("steps", "shutdown", ()),
    Place("requests", "add_request", ("request",)),
    Place("requests", "finish_requests", ("request_ids", "finished_status")),
    Place("requests", "requests", dict),
    Place("requests", "_free_request", ("request",)),
    Place("order of running", "running", list),
    Place("order of waiting", "waiting", object, later=f"{_WAITING}.create_request_queue"),
    Place("order of waiting", "waiting.remove_request", ("request",)),
    Place("order of waiting", "waiting.prepend_request", ("request",)),
    Place("order of waiting", "policy", object),
    Place("order of waiting", "skipped_waiting", object, until=(0, 30), later="kv_holding_waiting"),
    Place("order of waiting", "kv_holding_waiting", object, since=(0, 31)),
    Place("order of waiting", f"{_WAITING}.create_request_queue", (), is_draft=True),
    Place("order of waiting", f"{_WAITING}.select_queue", ("waiting_head", "skipped_head"), is_draft=True),
    Place("budget", "max_num_scheduled_tokens", int),
    Place("cap", "_reserve_prefill_lookahead", ("request", "num_computed_tokens", "num_new_tokens")),
    Place("victim", "_preempt_request", ("request",)),
    Place("victim", "requires_kv_delivery", bool),
    Place("victim", f"{_MANAGER}.allocate_slots", ("request", "num_new_tokens")),
    Place("victim", "running", list, later=f"{_VICTIM}.preemption_key"),
    Place("victim", f"{_VICTIM}.preemption_key", ("request", "running_position"), is_draft=True),
    Place(
        "admission",
        "_select_waiting_queue_for_scheduling",
        (),
        until=(0, 30),
        later="_handle_blocked_waiting_request",
    ),
    Place("admission", "_handle_blocked_waiting_request", ("request",), since=(0, 31)),
    Place("admission", "max_num_running_reqs", int, later="max_num_active_reqs"),
    Place("admission", "max_num_active_reqs", int, since=(0, 31)),
    Place("admission", "num_waiting_for_streaming_input", int),
    Place("admission", "pause_state", int),
    Place("admission", "lora_config", object),
    Place("admission", f"{_MANAGER}.watermark_blocks", int),
    Place("freed blocks", f"{_MANAGER}.enable_caching", bool),
    Place("freed blocks", f"{_MANAGER}.coordinator.single_type_managers", tuple),
    Place("freed blocks", f"{_POOL}.free_blocks", ("ordered_blocks",)),
    Place("freed blocks", f"{_POOL}.get_new_blocks", ("num_blocks",)),
    Place("freed blocks", f"{_POOL}.touch", ("blocks",)),
    Place("freed blocks", f"{_POOL}.evict_blocks", ("block_ids",)),
    Place("freed blocks", f"{_POOL}.reset_prefix_cache", ()),
    Place("freed blocks", f"{_POOL}.unpin_blocks", ("blocks",)),
    Place("freed blocks", f"{_POOL}.get_num_free_blocks", ()),
    Place("freed blocks", f"{_POOL}.blocks", list),
    Place("freed blocks", f"{_POOL}.num_gpu_blocks", int),
    Place("freed blocks", f"{_POOL}.free_block_queue.get_all_free_blocks", ()),
    Place("freed blocks", f"{_POOL}.free_block_queue.remove", ("block",)),
    Place("freed blocks", f"{_POOL}.free_block_queue.prepend_n", ("blocks",)),
    Place("freed blocks", f"{_POOL}.free_block_queue.num_free_blocks", int),
    Place("probes", f"{_MANAGER}.record_prefix_cache_stats", ("request",)),
    Place("probes", f"{_MANAGER}.free", ("request",)),
    Place("shape", "connector", object),
    Place("shape", "vllm_config", object),
    Place("shape", "cache_config", object),
    Place("shape", "max_model_len", int),
    Place("shape", "num_sampled_tokens_per_step", int),
    Place("shape", "num_spec_tokens", int),
    Place("shape", "num_lookahead_tokens", int),
    Place("shape", "need_mamba_block_aligned_split", bool),
    Place("shape", "block_size", int),
    Place("shape", "scheduler_config.enable_chunked_prefill", bool),
    Place("shape", "scheduler_config.disable_chunked_mm_input", bool),
    Place("shape", "scheduler_config.async_scheduling", bool),
)


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
    moved = _moved(
        scheduler, (place for place in PLACES if not place.is_draft and place.since <= release <= place.until)
    )
    if moved:
        raise RuntimeError(f"vLLM {version} is not supported by this Meridian: its scheduler lacks {'; '.join(moved)}")


def choose_seams(scheduler: Any) -> Seams:
    """The seams of this scheduler: vLLM's plug-ins where it has those of `PLACES`, or else lists and methods only."""
    from meridian.vllm.seams import ListSeams

    if not hasattr(scheduler, "scheduler_plugin_manager"):
        return ListSeams(scheduler)
    moved = _moved(scheduler, (place for place in PLACES if place.is_draft))
    if moved:
        logger.warning("meridian: vLLM's scheduler plug-ins are not used: they lack %s", "; ".join(moved))
        return ListSeams(scheduler)
    from meridian.vllm.plugin_seams import PluginSeams

    return PluginSeams(scheduler)


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


def _moved(scheduler: Any, places: Iterable[Place]) -> list[str]:
    """Those of the places that are not there, or that are something else."""
    return [said for place in places if (said := lacks(scheduler, place))]


def lacks(scheduler: Any, place: Place) -> str:
    """What of a place is missing or something else; empty if nothing is."""
    path, needs = place.path, place.needs
    is_method = isinstance(needs, tuple)
    try:
        found = _method_at(scheduler, path) if is_method else _at(scheduler, path)
        parameters = inspect.signature(found).parameters if is_method else {}
    except (AttributeError, TypeError, ValueError):
        return f"{path}()" if is_method else path
    if not isinstance(needs, tuple):
        return "" if isinstance(found, needs) else f"{path} as {needs.__name__}, it is {type(found).__name__}"
    takes_all = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters.values())
    missing = [] if takes_all else [name for name in needs if name not in parameters]
    return f"{path}({', '.join(missing)})" if missing else ""
