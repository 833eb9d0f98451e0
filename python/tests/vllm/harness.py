"""The real vLLM engine on CPU, as the benchmark's driver builds it, and what the tests do with it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from meridian.vllm.bench.model import model_dir
from meridian.vllm.bench.request import TraceRequest
from meridian.vllm.bench.run import Options, Run, build

from checks import started

KV_BLOCKS = 48
KV_BLOCK_TOKENS = 32


@dataclass
class Engine:
    """The real engine, and what the tests do with it."""

    run: Run

    @property
    def scheduler(self) -> Any:
        """The `SyncMeridianScheduler` inside."""
        return self.run.scheduler

    def native(
        self,
        source: str,
        *,
        options: dict[str, Any] | None = None,
        deadline_ms: float = 1000.0,
        memory_mib: int = 64,
        eviction: str = "native:tiered-lru",
        model: dict[str, Any] | None = None,
        kv_memory: dict[str, Any] | None = None,
        service_levels: dict[str, Any] | None = None,
        **scheduler_fields: Any,
    ) -> Any:
        """A fresh native engine with this dispatch source, for this model. The deadline is far off unless it is the
        subject: a busy machine may pause any call for milliseconds."""
        from meridian import KvMemoryConfig, MeridianConfig, ModelConfig, PolicyConfig, SchedulerConfig, SlotConfig
        from meridian.vllm.parts import make_engine

        config = MeridianConfig(
            scheduler=SchedulerConfig(**scheduler_fields),
            kv_memory=KvMemoryConfig(**kv_memory or {}),
            model=ModelConfig(**model or {}),
            service_levels=service_levels or {},
            policy=PolicyConfig(
                dispatch=SlotConfig(source, options or {}, deadline_ms=deadline_ms, memory_mib=memory_mib),
                eviction=SlotConfig(eviction, deadline_ms=deadline_ms if eviction.endswith(".wasm") else 2.0),
            ),
        )
        return make_engine(config, self.scheduler)

    @contextmanager
    def using(self, native: Any) -> Iterator[Any]:
        """Put `native` (None for stock) into the idle engine; every request must be over at the end."""
        before = self.scheduler._meridian
        from meridian import _native

        is_scripted = native is not None and not isinstance(native, _native.Engine)
        self.scheduler._meridian_use(None if is_scripted else native)
        # What only plans steps has no say in KV memory.
        self.scheduler._meridian = native
        try:
            yield native
        finally:
            self.scheduler._meridian_use(before)
            assert not self.run.engine.has_unfinished_requests()

    def generate(
        self,
        requests: list[TraceRequest],
        each_step: Callable[[], None] = lambda: None,
        max_steps: int = 5000,
        refuses: bool = False,
    ) -> list[list[int]]:
        """Run requests that arrive together to their end; returns their tokens. Seeded, greedy, float32.

        With `refuses`, requests may end without any.
        """
        rng = random.Random(0)
        self.run.seen.clear()
        self.run.by_name.clear()
        observed = [self.run.add(str(i), request, i, 0.0, rng) for i, request in enumerate(requests)]
        for _ in range(max_steps):
            if not self.run.engine.has_unfinished_requests():
                break
            self.run.step()
            each_step()
        else:
            pytest.fail(f"requests are not over after {max_steps} steps")
        for request, seen in zip(requests, observed, strict=True):
            assert seen.finished is not None
            if refuses and not seen.tokens:
                continue
            assert len(seen.tokens) == request.think_tokens + request.output_tokens + len(self.run.end_ids)
            assert seen.think_end == request.think_tokens + len(self.run.end_ids) - 1
        return [seen.tokens for seen in observed]


def requests(n: int, seed: int = 0) -> list[TraceRequest]:
    """Requests that together need more KV than the engine has, when n is at least 12."""
    rng = random.Random(seed)
    return [TraceRequest(0.0, rng.randint(20, 120), rng.randint(4, 60), rng.randint(4, 60)) for _ in range(n)]


def make_engine() -> Engine:
    """The engine, with `native:output-first`."""
    started.count()
    options = Options(
        model=model_dir(),
        scheduler="native:output-first",
        kv_blocks=KV_BLOCKS,
        block_size=KV_BLOCK_TOKENS,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        max_model_len=1024,
        dtype="float32",
    )
    return Engine(build(options))
