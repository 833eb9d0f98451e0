"""Meridian for a vLLM engine that is built already, and out of it again.

scheduler = engine.engine_core.engine_core.scheduler
plugin = MeridianSchedulerPlugin(scheduler=scheduler, config=meridian.load_config(path))
plugin.attach()
...
plugin.detach()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

    from meridian.config import MeridianConfig


class MeridianSchedulerPlugin:
    """Puts Meridian into a scheduler that is in this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`), between two steps.

    Requests that are under way are taken over with the tokens they have. After `detach` the scheduler is of its own
    class again, with its own methods, and its requests go on.
    """

    def __init__(self, scheduler: Scheduler, config: MeridianConfig) -> None:
        self._scheduler: Any = scheduler
        self._config = config
        self._own_class: type | None = None

    def attach(self) -> None:
        """Put Meridian in.

        Raises:
            RuntimeError: it is in already, or this vLLM is not supported.
            ConfigError: the configuration or the combination of options is not valid.
            PolicyError: a policy was refused. The scheduler is as it was.
        """
        from meridian.vllm.scheduler import attach_to

        self._own_class = attach_to(self._scheduler, self._config)

    def detach(self) -> None:
        """Take Meridian out; nothing happens when it is not in."""
        if self._own_class is not None:
            from meridian.vllm.scheduler import detach_from

            detach_from(self._scheduler, self._own_class)
            self._own_class = None
