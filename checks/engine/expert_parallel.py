"""Stand-ins for what vLLM 0.32 lacks for expert parallelism on CPUs, where it starts, and fails at the first token.

Its communicator for CPUs leaves two operations to its base class, which raises `NotImplementedError`
(vllm/distributed/device_communicators/base_device_communicator.py); here they are gloo's. Its kernel takes the numbers
of experts for those of its own process (vllm/model_executor/layers/fused_moe/experts/cpu_moe.py); here it gets these. A
worker imports this module for its `--worker-extension-cls`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


def all_gatherv(
    self: Any, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """The tensors of all ranks, one behind another; rank i has `sizes[i]` rows, all as many if there are no sizes."""
    assert dim == 0, dim
    if isinstance(input_, list):
        return [all_gatherv(self, own, dim, sizes) for own in input_]  # type: ignore[misc]
    rows = sizes or [len(input_)] * self.world_size
    assert len(input_) == rows[self.rank_in_group], (len(input_), rows)
    # gloo gathers tensors of one shape.
    padded = input_.new_zeros(max(rows), *input_.shape[1:])
    padded[: len(input_)] = input_
    found = [torch.empty_like(padded) for _ in rows]
    torch.distributed.all_gather(found, padded, group=self.device_group)
    return torch.cat([of[:count] for of, count in zip(found, rows, strict=True)])


def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """This rank's rows of the sum over all ranks; `sizes` as for `all_gatherv`."""
    assert dim == 0, dim
    total = input_.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=self.device_group)
    return total.split(sizes or len(total) // self.world_size)[self.rank_in_group]


_apply = CPUUnquantizedExperts.apply


@functools.wraps(_apply)
def apply_own(self: Any, **given: Any) -> None:
    """Compute the experts of this process; those of others, which have the number -1 here, weigh nothing."""
    if given["expert_map"] is not None:
        assert not given["apply_router_weight_on_input"], "the kernel then does not look at the weights"
        own = given["expert_map"][given["topk_ids"].long()]
        given["topk_weights"] = given["topk_weights"].masked_fill(own < 0, 0.0)
        given["topk_ids"] = own.clamp(min=0).to(given["topk_ids"].dtype)
    _apply(self, **given)


CpuCommunicator.all_gatherv = all_gatherv
CpuCommunicator.reduce_scatterv = reduce_scatterv
setattr(CPUUnquantizedExperts, "apply", apply_own)  # noqa: B010


class Extension:
    """Nothing: naming it makes a worker import this module."""
