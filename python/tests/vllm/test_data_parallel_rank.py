"""The rank that an engine reports, from the forms in which vLLM keeps it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from meridian.vllm.parts import data_parallel


@pytest.mark.parametrize(
    ("index", "rank", "size", "expected"),
    [
        (0, 0, 1, (0, None)),
        (1, 1, 2, (1, 2)),
        # A dense model: vLLM has reset rank and size to those of a single engine.
        (3, 0, 1, (3, None)),
        (0, 0, 4, (0, 4)),
    ],
)
def test_rank_and_size(index: int, rank: int, size: int, expected: tuple[int, int | None]) -> None:
    parallel = SimpleNamespace(data_parallel_index=index, data_parallel_rank=rank, data_parallel_size=size)
    assert data_parallel(cast("Any", SimpleNamespace(parallel_config=parallel))) == expected
