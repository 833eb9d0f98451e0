"""vLLM's scheduler by itself, without workers and model, under a load that goes on for ever.

As many requests run as there are seats. Each has a prompt, thinks, and generates a number of tokens drawn from the
seed; when one ends, the next one arrives. The KV memory is so small that an arriving request takes blocks that ended
ones have left in the prefix cache. Equal seeds give equal loads, whoever schedules.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
BLOCK_TOKENS, MODEL_TOKENS = 16, 2048
PROMPT_TOKENS, GENERATED_TOKENS = (48, 160), (100, 500)
# More than a request takes on average: what is between stays in the prefix cache.
BLOCKS_A_REQUEST = 48
NO_LISTENERS = '[telemetry]\nprometheus = ""\n[admin]\nlisten = ""\n'
# The configuration of each contestant; None is vLLM's own scheduler.
CONTESTANTS: dict[str, str | None] = {
    "stock": None,
    "default": NO_LISTENERS,
    "fcfs": NO_LISTENERS + '[policy.dispatch]\nsource = "native:fcfs"\n',
}


def scheduler_of(contestant: str, running: int, model: str) -> Any:
    """A scheduler with this many seats."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    kind: Any = Scheduler
    toml = CONTESTANTS[contestant]
    if toml is not None:
        file = Path(tempfile.mkdtemp()) / "meridian.toml"
        file.write_text(toml)
        os.environ["MERIDIAN_CONFIG"] = str(file)
        from meridian.vllm import MeridianScheduler

        kind = MeridianScheduler
    init_none_hash(sha256)
    args = EngineArgs(
        model=model,
        dtype="float32",
        max_model_len=MODEL_TOKENS,
        block_size=BLOCK_TOKENS,  # type: ignore[arg-type]
        max_num_seqs=running,
        max_num_batched_tokens=MODEL_TOKENS,
        reasoning_parser="qwen3",
        disable_log_stats=True,
        async_scheduling=False,
    )
    config = args.create_engine_config()
    blocks = config.cache_config.num_gpu_blocks = running * BLOCKS_A_REQUEST + 64
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        log_stats=False,
    )


class Load:
    """One scheduler under the load. `schedule_ns` and `update_ns` have the times of its two methods, a step each."""

    def __init__(
        self, contestant: str, running: int, model: str, seed: int, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher

        self.scheduler = scheduler_of(contestant, running, model)
        self.running = running
        self.clock = clock
        self.schedule_ns: list[int] = []
        self.update_ns: list[int] = []
        # Steps in which a request ended or was admitted.
        self.turnover: list[bool] = []
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._random = random.Random(seed)
        self._ends_at: dict[str, int] = {}
        self._arrived = 0
        tokenizer = self.scheduler.vllm_config.model_config.tokenizer
        from transformers import AutoTokenizer

        encode = AutoTokenizer.from_pretrained(tokenizer).encode
        self._think, self._end = (encode(text, add_special_tokens=False) for text in ("<think>", "</think>"))

    def _arrive(self) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        draw, name = self._random.randint, f"request-{self._arrived}"
        most = draw(*GENERATED_TOKENS)
        # The first ones end one after another from the first step on.
        tokens = draw(1, most) if self._arrived < self.running else most
        prompt = [draw(300, 1900) for _ in range(draw(*PROMPT_TOKENS))] + self._think
        self._arrived += 1
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        request = Request(name, prompt, params, None, arrival_time=time.time(), block_hasher=self._hasher)
        self._ends_at[name] = tokens // 2
        self.scheduler.add_request(request)

    def _token(self, name: str) -> int:
        """Half of the tokens are thinking."""
        position = self.scheduler.requests[name].num_output_tokens
        return self._end[0] if position == self._ends_at[name] else 300 + (position * 7 + len(name)) % 1600

    def step(self) -> None:
        """A step, as vLLM's engine makes it."""
        from vllm.v1.outputs import ModelRunnerOutput

        scheduler = self.scheduler
        while len(scheduler.requests) < self.running:
            self._arrive()
        began = self.clock()
        output = scheduler.schedule()
        scheduled = self.clock()
        names = list(output.num_scheduled_tokens)
        requests = scheduler.requests
        tokens = [[] if requests[name].is_prefill_chunk else [self._token(name)] for name in names]
        result = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, tokens)
        before = self.clock()
        scheduler.update_from_output(output, result)
        over = self.clock()
        self.schedule_ns.append(scheduled - began)
        self.update_ns.append(over - before)
        ended = output.total_num_scheduled_tokens and len(requests) < self.running
        self.turnover.append(bool(output.scheduled_new_reqs or ended))
        for name in output.finished_req_ids:
            self._ends_at.pop(name, None)
