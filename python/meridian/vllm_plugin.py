"""Put Meridian into a vLLM engine that already exists, and take it out again.

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
    """Puts Meridian into a scheduler of this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`), between two steps.

    Meridian takes over live requests with the tokens that they have. After `detach`, the scheduler has its own class
    and its own methods again, and its requests continue.
    """

    def __init__(self, scheduler: Scheduler, config: MeridianConfig) -> None:
        self._scheduler: Any = scheduler
        self._config = config
        self._own_class: type | None = None

    def attach(self) -> None:
        """Put Meridian in.

        Raises:
            RuntimeError: Meridian is already in this scheduler, or this vLLM is not supported.
            ConfigError: the configuration or the combination of options is not valid.
            PolicyError: a policy was refused. The scheduler is unchanged.
        """
        from meridian.vllm.scheduler import attach_to

        self._own_class = attach_to(self._scheduler, self._config)

    def detach(self) -> None:
        """Take Meridian out; does nothing if it is not in."""
        if self._own_class is not None:
            from meridian.vllm.scheduler import detach_from

            detach_from(self._scheduler, self._own_class)
            self._own_class = None
