"""Shared by the tests. Those under `vllm/` run the real vLLM engine on CPU; the rest need only the wheel."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def built(path: str, target: str) -> Path:
    """A build result the tests need; says which make target makes it."""
    found = ROOT / path
    if not found.exists():
        pytest.fail(f"{path} is missing: run `make {target}` first")
    return found


@pytest.fixture(scope="session")
def policies() -> Path:
    """Folder of the shipped components."""
    return built("target/policies", "policies")


@pytest.fixture(scope="session")
def hostile() -> Path:
    """Folder of the hostile components; `kinds.txt` names the fault that each causes."""
    return built("target/hostile", "test")


@pytest.fixture(scope="session")
def tokenizers() -> Path:
    """Folder of real tokenizers: FAMILY/tokenizer.json."""
    folder = os.environ.get("MERIDIAN_TOKENIZERS")
    if not folder:
        pytest.fail(
            "MERIDIAN_TOKENIZERS is not set: run `make test`, or set it to the output of scripts/setup-tokenizers.sh"
        )
    return Path(folder)
