"""vLLM's KV offloading on a CPU: connector, scheduler, manager and policies are vLLM's own; only the copies are not.

`CPUOffloadingSpec` refuses to start without a GPU (vllm/v1/kv_offload/cpu/spec.py, `get_worker`), whose streams its
worker uses. Here a copy is done when it is submitted.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


def transfer_config(blocks: int, policy: str) -> dict[str, Any]:
    """`--kv-transfer-config` for so many blocks in host memory; `policy` is vLLM's `lru`, `arc`, or Meridian's.

    Raises:
        ValueError: there are none.
    """
    if blocks < 1:
        raise ValueError(f"offload_blocks={blocks}: expected at least 1 beside offload={policy!r}")
    extra: dict[str, Any] = {
        "spec_name": "HostCopiesSpec",
        "spec_module_path": __name__,
        # vLLM refuses to start without this; `HostCopiesSpec` takes the blocks.
        "cpu_bytes_to_use": 1,
        "blocks": blocks,
        "eviction_policy": policy,
    }
    if policy == "PhaseAwareCachePolicy":
        extra["cache_policy_module_path"] = "meridian.vllm"
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


class HostCopies(OffloadingWorker):
    """Copies blocks between the engine's memory and chunks of one block each, at once."""

    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int) -> None:
        self._engine = [cache.tensor for cache in kv_caches.tensors]
        self._host = [torch.empty((chunks, *tensor.shape[1:]), dtype=tensor.dtype) for tensor in self._engine]
        self._finished: list[TransferResult] = []

    def _copy(
        self, job_id: int, sources: list[torch.Tensor], source_ids: Any, targets: list[torch.Tensor], target_ids: Any
    ) -> bool:
        start = time.perf_counter()
        from_ids, to_ids = torch.from_numpy(source_ids).long(), torch.from_numpy(target_ids).long()
        copied = 0
        for source, target in zip(sources, targets, strict=True):
            rows = source[from_ids]
            target[to_ids] = rows
            copied += rows.numel() * rows.element_size()
        self._finished.append(TransferResult(job_id, True, copied, time.perf_counter() - start))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._engine, src_spec.block_ids, self._host, dst_spec.block_ids)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._host, src_spec.block_ids, self._engine, dst_spec.block_ids)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Every copy is done when it is submitted."""


class HostCopiesSpec(CPUOffloadingSpec):
    """vLLM's own, with a worker that needs no GPU, and a size in blocks."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.num_chunks = self.extra_config["blocks"]

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        assert len(kv_caches.group_data_refs) == 1
        return HostCopies(kv_caches, self.num_chunks)
