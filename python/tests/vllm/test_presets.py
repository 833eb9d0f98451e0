"""Simulated engines start as vLLM does: its own function, asked about the same devices, gives the presets' flags."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CacheConfig
from vllm.engine import arg_utils
from vllm.usage.usage_lib import UsageContext

ROOT = Path(__file__).resolve().parents[3]
GIB = 1 << 30


def presets() -> list[dict[str, Any]]:
    command = ROOT / "target" / "release" / "meridian"
    return json.loads(subprocess.check_output((command, "--json", "bench", "engines"), text=True))


def device(name: str, memory_gib: float) -> SimpleNamespace:
    """A GPU, as vLLM's platform describes the one that it finds."""
    return SimpleNamespace(
        get_device_total_memory=lambda: int(memory_gib * GIB),
        get_device_name=lambda: name,
        is_device_capability=lambda _: False,
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )


def test_presets_have_the_flags_that_vllm_starts_with(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for preset in presets():
        monkeypatch.setattr(arg_utils, "current_platform", device(preset["device"], preset["memory_gib"]))
        tokens, seats = arg_utils.EngineArgs.get_batch_defaults(preset["gpus"])
        api_server = UsageContext.OPENAI_API_SERVER
        ours = (preset["max_num_seqs"], preset["max_num_batched_tokens"])
        assert ours == (seats[api_server], tokens[api_server]), preset["name"]
        seen.add(ours)
    assert seen == {(1024, 16384), (1024, 8192), (256, 2048)}


def test_presets_take_the_share_of_memory_that_vllm_takes() -> None:
    default = CacheConfig.__dataclass_fields__["gpu_memory_utilization"].default
    default = getattr(default, "default", default)
    assert {preset["memory_share"] for preset in presets()} == {default}
