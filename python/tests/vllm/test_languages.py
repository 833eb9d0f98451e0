"""Policies in every language, from `meridian policy new` to the real engine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from harness import Engine, requests

# The expression of the template's key, and one that leaves the engine's order alone.
KEYS = {
    "rust": ("src/lib.rs", "request.prompt_tokens() - request.cached_tokens()", "0.0 * request.prompt_tokens()"),
    "c": ("policy.c", "prompt[i] - cached[i]", "0.0f * (prompt[i] - cached[i])"),
    "python": ("policy.py", "p - c for", "0.0 * p for"),
    "js": ("policy.js", "columns[i] - columns[candidates + i]", "0 * columns[i]"),
}
# What a component with an interpreter needs, as its `policy.toml` says.
MEMORY_MIB = 128
SLOTS = ("dispatch", "eviction", "budget")


def meridian(root: Path, *args: str, cwd: Path) -> dict[str, Any]:
    """Run the command with a Rust that can build components; its last line of JSON."""
    script = f'. "$({root}/scripts/setup-wasm32.sh)"; exec {root}/target/release/meridian --json "$@"'
    run = subprocess.run(("bash", "-c", script, "bash", *args), cwd=cwd, capture_output=True, text=True)
    assert run.returncode == 0, f"{args}: {run.stdout}{run.stderr}"
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the policies of these tests are made."""
    return tmp_path_factory.mktemp("languages")


@pytest.mark.parametrize("language", KEYS)
def test_a_new_policy_passes_its_tests_in_every_slot(root: Path, made: Path, language: str) -> None:
    for slot in SLOTS:
        name = f"{language}-{slot}"
        meridian(root, "policy", "new", name, "--lang", language, "--slot", slot, cwd=made)
        # A busy machine says nothing about a policy.
        tested = meridian(root, "policy", "test", name, "--deadline-ms", "1000", cwd=made)
        assert tested["ok"]
        (found,) = tested["slots"]
        assert found["slot"] == slot
        assert len(found["cases"]) == 2


@pytest.mark.parametrize("language", [language for language in KEYS if language != "rust"])
def test_every_language_gives_the_keys_of_rust(root: Path, made: Path, language: str) -> None:
    for slot in SLOTS:
        component, rust = (f"{name}-{slot}/target/policies/{name}-{slot}.wasm" for name in (language, "rust"))
        args = ("--same-as", rust, "--batches", "300", "--memory-mib", str(MEMORY_MIB), "--deadline-ms", "1000")
        assert meridian(root, "policy", "test", component, *args, cwd=made)["ok"]


@pytest.mark.parametrize("language", KEYS)
def test_fcfs_in_every_language_is_stock(
    root: Path, made: Path, engine: Engine, stock_tokens: list[list[int]], language: str
) -> None:
    name = f"{language}-fcfs"
    meridian(root, "policy", "new", name, "--lang", language, cwd=made)
    source, key, same = KEYS[language]
    code = (made / name / source).read_text()
    assert code.count(key) == 1
    (made / name / source).write_text(code.replace(key, same))
    meridian(root, "policy", "build", name, "--out", name, cwd=made)
    with engine.using(engine.native(str(made / name / f"{name}.wasm"), memory_mib=MEMORY_MIB)) as native:
        assert engine.generate(requests(24)) == stock_tokens
        status = json.loads(native.policies.status())["slots"][0]
        assert not any(count for _, count in status["faults"])
        assert status["active"]["source"].endswith(f"{name}.wasm")
        assert native.stats()["requests"] == 0
        native.policies.close()
