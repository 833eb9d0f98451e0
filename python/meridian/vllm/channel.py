"""What the scheduling process and the sampling processes tell each other, in vLLM's own messages.

The orders of a step are an attribute of its `SchedulerOutput`, and measurements are one of a `ModelRunnerOutput`
(vllm/v1/core/sched/output.py, vllm/v1/outputs.py): vLLM brings the first to every worker before it samples, and the
second back with the tokens, within a process, between processes and between machines. Both are dataclasses, which every
executor pickles with all of their attributes. Records are meridian-core's `Order` and `Report`. Before them, the
scheduler says how its configuration ends thinking, so that all processes use one configuration.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import AsyncModelRunnerOutput

from meridian.vllm.seams import ListSeams

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput

    from meridian.config import ModelConfig

# The attributes.
_ORDERS, _REPORTS = "meridian_orders", "meridian_reports"
# Prefix of the message that carries the model's configuration; no record begins with it.
MODEL = b"meridian-model "
# The fields of the table `[model]` that samplers need.
_MODEL_FIELDS = (
    "family",
    "think_start",
    "think_end",
    "resumes",
    "tool_call",
    "tool_call_ends_thinking",
    "force_phrase",
    "interrupt",
    "eos_guard",
    "min_answer_tokens",
)
# vLLM's model runners V1 and V2, and their methods: a step arrives, and its tokens leave. Both are wrapped.
_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
_ARRIVES, _LEAVES = "execute_model", "sample_tokens"


class ToSamplers:
    """The scheduler's end."""

    def __init__(self) -> None:
        self._messages: list[bytes] = []
        self._is_configured = False

    def configure(self, model: ModelConfig | None) -> None:
        """Make every sampler end thinking as `model` says; None restores its own configuration."""
        fields = None if model is None else {name: getattr(model, name) for name in _MODEL_FIELDS}
        if self._is_configured or fields is not None:
            self._messages.append(MODEL + json.dumps(fields).encode())
        self._is_configured = fields is not None

    def tell(self, orders: bytes | None) -> None:
        """Send orders to every sampler, with the next step."""
        if orders:
            self._messages.append(orders)

    def leave_with(self, step: SchedulerOutput) -> None:
        """Put what there is to say into the output of `schedule()`."""
        if self._messages:
            setattr(step, _ORDERS, (*self._messages, *getattr(step, _ORDERS, ())))
            self._messages.clear()

    def leave_later(self, scheduler: Scheduler) -> None:
        """Do so at the next step of a scheduler that Meridian has left."""
        if not self._messages:
            return
        own, seams = scheduler.schedule, ListSeams(scheduler)

        def schedule(*args: Any, **kwargs: Any) -> SchedulerOutput:
            seams.unwrap(scheduler, "schedule", schedule)
            step = own(*args, **kwargs)
            self.leave_with(step)
            return step

        seams.wrap(scheduler, "schedule", schedule)


def reports_in(output: ModelRunnerOutput) -> Sequence[bytes]:
    """What the samplers of a step have measured."""
    return getattr(output, _REPORTS, ())


class ToScheduler:
    """A sampler's end, for one thread."""

    def __init__(self) -> None:
        self._orders: list[bytes] = []
        self._reports: list[bytes] = []

    def received(self) -> list[bytes]:
        """Orders since the last call."""
        taken, self._orders = self._orders, []
        return taken

    def tell(self, report: bytes) -> None:
        """Send measurements, with the tokens of this step."""
        self._reports.append(report)

    def step_arrives(self, step: SchedulerOutput) -> None:
        """Take in the orders of a step."""
        self._orders.extend(getattr(step, _ORDERS, ()))

    def leave_with(self, output: Any) -> Any:
        """Put the measurements into what the model runner returns, and return that."""
        # Without tokens, as on the ranks that only compute, nothing was measured.
        if output is None or not self._reports:
            return output
        reports, self._reports = tuple(self._reports), []
        if not isinstance(output, AsyncModelRunnerOutput):
            return _with(output, reports)
        # vLLM calls it on another thread, and on ranks whose output nobody takes never: it must not keep itself alive.
        held = weakref.ref(output)

        def get_output() -> ModelRunnerOutput:
            own: Any = held()
            return _with(type(own).get_output(own), reports)

        output.get_output = get_output  # type: ignore[method-assign]
        return output


def _with(output: ModelRunnerOutput, reports: tuple[bytes, ...]) -> ModelRunnerOutput:
    # vLLM shares its empty output between steps.
    marked = output if output.req_ids else copy.copy(output)
    setattr(marked, _REPORTS, reports)
    return marked


# The end of each engine whose model runner is in this process, by the identity of its configuration, which the end's
# owner keeps alive.
_ENDS: weakref.WeakValueDictionary[int, ToScheduler] = weakref.WeakValueDictionary()


def listen(vllm_config: VllmConfig, end: ToScheduler) -> None:
    """Give the model runner with this configuration, which is being made, its end.

    Raises:
        RuntimeError: this vLLM has none of the model runners that Meridian knows.
    """
    _ENDS[id(vllm_config)] = end
    modules = [module for name in _RUNNERS if (module := sys.modules.get(name)) is not None]
    if not modules:
        raise _not_supported("no model runner V1 or V2 is in use")
    for module in modules:
        if not hasattr(module.GPUModelRunner, _ORDERS):
            _wrap(module.GPUModelRunner)


def _not_supported(why: str) -> RuntimeError:
    import vllm

    return RuntimeError(f"vLLM {vllm.__version__} is not supported by this Meridian: {why}")


def _wrap(runner: Any) -> None:
    arrives, leaves = getattr(runner, _ARRIVES), getattr(runner, _LEAVES)
    given = tuple(inspect.signature(arrives).parameters)[:2]
    if given != ("self", "scheduler_output"):
        raise _not_supported(f"{runner.__module__}.GPUModelRunner.{_ARRIVES}({', '.join(given)})")

    @functools.wraps(arrives)
    def execute_model(self: Any, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        end = _ENDS.get(id(self.vllm_config))
        if end is not None:
            end.step_arrives(scheduler_output)
        return arrives(self, scheduler_output, *args, **kwargs)

    @functools.wraps(leaves)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = leaves(self, *args, **kwargs)
        end = _ENDS.get(id(self.vllm_config))
        return output if end is None else end.leave_with(output)

    # On the class, because other code may wrap the methods in turn.
    setattr(runner, _ORDERS, True)
    setattr(runner, _ARRIVES, execute_model)
    setattr(runner, _LEAVES, sample_tokens)
