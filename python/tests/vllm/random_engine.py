"""Engines for random sequences: vLLM's own scheduler with each of its features, and a KV connector and grammars that
need no model."""

from __future__ import annotations

import copy
import functools
import random
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

BLOCK_TOKENS = 8
MAX_MODEL_LEN = 128
# Every prompt ends with the start of the thinking; a generated END ends it, a STOP ends the request.
THINK, END, STOP = 7, 8, 9
# A step takes so long, and so much longer for each token.
STEP_MS, TOKEN_MS = 3.0, 0.25
EPOCH_S = 1e6
MAX_STEPS = 4000
ADAPTERS = 5


@dataclass(frozen=True)
class Feature:
    """What the engine and its requests have."""

    name: str
    adapters: bool = False
    images: bool = False
    # vLLM's --disable-chunked-mm-input.
    whole_images: bool = False
    chunked_prefill: bool = True
    pipeline: int = 1
    asynchronous: bool = False
    drafts: int = 0
    connector: bool = False
    grammars: bool = False
    sessions: bool = False
    aborts: bool = False
    resets: bool = False
    # A second group of layers, with a sliding window.
    window: bool = False
    caching: bool = True
    # vLLM's --scheduling-policy priority.
    priority: bool = False
    # Some requests have a seed: on a CPU, vLLM's model runner fails at a part of their prompts.
    seeds: bool = False
    # A second group of layers, with Mamba's state: prompts are computed in whole blocks.
    hybrid: bool = False

    @property
    def block_tokens(self) -> int:
        return BLOCK_TOKENS * (3 if self.hybrid else 1)


FEATURES = (
    Feature("plain"),
    Feature("caching-off", caching=False),
    Feature("adapters", adapters=True),
    Feature("images", images=True),
    Feature("whole-images", images=True, whole_images=True),
    Feature("chunking-off", chunked_prefill=False),
    Feature("pipeline", pipeline=2),
    Feature("asynchronous", asynchronous=True),
    Feature("drafts", drafts=3),
    Feature("connector", connector=True),
    Feature("grammars", grammars=True),
    Feature("sessions", sessions=True),
    Feature("aborts", aborts=True),
    Feature("resets", resets=True, aborts=True),
    Feature("window", window=True),
    Feature("priority", priority=True),
    Feature("priority-aborts-caching-off", priority=True, aborts=True, caching=False),
    Feature("adapters-drafts-aborts", adapters=True, drafts=2, aborts=True),
    Feature("pipeline-connector-aborts", pipeline=2, connector=True, aborts=True),
    Feature("chunking-off-pipeline-drafts", chunked_prefill=False, pipeline=2, drafts=2),
    Feature("whole-images-adapters-resets", images=True, whole_images=True, adapters=True, resets=True),
    Feature("asynchronous-grammars-aborts", asynchronous=True, grammars=True, aborts=True),
    Feature("seeds", seeds=True),
    Feature("seeds-adapters-grammars-aborts", seeds=True, adapters=True, grammars=True, aborts=True),
    Feature("seeds-connector", seeds=True, connector=True),
    Feature("hybrid", hybrid=True),
    Feature("hybrid-asynchronous-adapters-aborts", hybrid=True, asynchronous=True, adapters=True, aborts=True),
    Feature("hybrid-grammars-priority", hybrid=True, grammars=True, priority=True),
)


def chance(*what: object) -> int:
    """A number that is the same for the same things, and any number otherwise."""
    return crc32(repr(what).encode())


class HashConnector(KVConnectorBase_V1):
    """Has a prefix of some prompts: it loads some of them within the step, others over the next steps. Keeps the blocks
    of some requests that end for a while."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # Steps until a transfer is over.
        self.receiving: dict[str, int] = {}
        self.sending: dict[str, int] = {}
        self.seed = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        kind = chance(self.seed, request.request_id, "matched") % 4
        if request.num_preemptions or kind == 0:
            return 0, False
        has = (request.num_prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        more = max(has - num_computed_tokens, 0)
        return more, more > 0 and kind > 1

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens and chance(self.seed, request.request_id, "matched") % 4 > 1:
            self.receiving[request.request_id] = 1 + chance(self.seed, request.request_id, "receives") % 6

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        is_kept = chance(self.seed, request.request_id, "keeps") % 3 == 0 and request.num_computed_tokens > 0
        if is_kept and request.request_id not in self.receiving:
            self.sending[request.request_id] = 1 + chance(self.seed, request.request_id, "sends") % 6
            return True, None
        return False, None

    def transfers_over(self) -> tuple[set[str], set[str]]:
        """Requests whose receiving and whose sending is over with this step."""
        over = []
        for under_way in (self.receiving, self.sending):
            for name in under_way:
                under_way[name] -= 1
            over.append({name for name, steps in under_way.items() if steps <= 0})
            for name in over[-1]:
                del under_way[name]
        return over[0], over[1]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


class AnyToken:
    """A grammar that takes every token."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens

    def is_terminated(self) -> bool:
        return False


@functools.cache
def model_config(folder: str) -> ModelConfig:
    return ModelConfig(model=folder, dtype="float32", seed=0)


@dataclass(frozen=True)
class Limits:
    """What bounds the steps of one engine, drawn from the seed."""

    seqs: int
    tokens: int
    blocks: int
    adapters: int
    encoder: int
    long_prefill: int
    model_len: int = MAX_MODEL_LEN

    @classmethod
    def drawn(cls, feature: Feature, rng: random.Random) -> Limits:
        tokens = rng.choice((32, 48, 64, 128)) if feature.chunked_prefill else rng.choice((MAX_MODEL_LEN, 160))
        # The longest request fits alone, a second one hardly.
        groups = 1 + feature.window + feature.hybrid
        blocks = groups * (MAX_MODEL_LEN // feature.block_tokens + 2) + rng.choice((0, 4, 12, 40))
        return cls(
            seqs=rng.randint(2, 8),
            tokens=tokens,
            blocks=blocks,
            adapters=rng.randint(1, 3),
            encoder=rng.choice((24, 40)),
            long_prefill=rng.choice((0, 0, 24)) if feature.chunked_prefill and not feature.images else 0,
        )


def vllm_config(feature: Feature, limits: Limits, model: str) -> VllmConfig:
    scheduler = SchedulerConfig(
        max_num_seqs=limits.seqs,
        max_num_batched_tokens=limits.tokens,
        max_model_len=limits.model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=feature.chunked_prefill,
        disable_chunked_mm_input=feature.whole_images,
        async_scheduling=feature.asynchronous,
        policy="priority" if feature.priority else "fcfs",
        long_prefill_token_threshold=limits.long_prefill,
        disable_hybrid_kv_cache_manager=True if feature.connector else None,
    )
    cache = CacheConfig(block_size=feature.block_tokens, enable_prefix_caching=feature.caching)
    cache.num_gpu_blocks = limits.blocks
    # Its own part is the same for all engines.
    model_part = copy.copy(model_config(model))
    model_part.max_model_len = limits.model_len
    config = VllmConfig(
        model_config=model_part,
        scheduler_config=scheduler,
        cache_config=cache,
        parallel_config=ParallelConfig(pipeline_parallel_size=1),
        lora_config=LoRAConfig(max_loras=limits.adapters, max_lora_rank=8) if feature.adapters else None,
        speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=feature.drafts)
        if feature.drafts
        else None,
        kv_transfer_config=KVTransferConfig(
            kv_connector="HashConnector", kv_connector_module_path=__name__, kv_role="kv_both"
        )
        if feature.connector
        else None,
    )
    # The model has no such layers: only the scheduler reads this, and the next.
    if feature.hybrid:
        config.cache_config.mamba_cache_mode = "align"
    config.parallel_config.pipeline_parallel_size = feature.pipeline
    return config


def make_scheduler(feature: Feature, limits: Limits, model: str) -> Any:
    """vLLM's own scheduler, nothing of Meridian's in it."""
    import torch
    from vllm.utils.hashing import sha256
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.structured_output import StructuredOutputManager

    init_none_hash(sha256)
    config = vllm_config(feature, limits, model)
    common: dict[str, Any] = {
        "block_size": feature.block_tokens,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.float32,
    }
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**common))]
    if feature.window:
        groups.append(KVCacheGroupSpec(["window"], SlidingWindowSpec(**common, sliding_window=3 * BLOCK_TOKENS)))
    if feature.hybrid:
        state = MambaSpec(
            block_size=feature.block_tokens, shapes=((1, 1),), dtypes=(torch.float32,), mamba_cache_mode="align"
        )
        groups.append(KVCacheGroupSpec(["state"], state))
    kind = AsyncScheduler if feature.asynchronous else Scheduler
    scheduler: Any = kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=limits.blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=feature.block_tokens,
        log_stats=False,
    )
    if feature.images:
        # The text model has no encoder; the scheduler does not ask it anything.
        scheduler.max_num_encoder_input_tokens = limits.encoder
        scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=limits.encoder)
    return scheduler
