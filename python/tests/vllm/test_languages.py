"""Policies in every language, from `meridian policy new` to the real engine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from harness import Engine, requests

ROOT = Path(__file__).resolve().parents[3]
# The expression of the template's key, and one that leaves the engine's order alone.
KEYS = {
    "rust": ("src/lib.rs", "request.prompt_tokens() - request.cached_tokens()", "0.0 * request.prompt_tokens()"),
    "c": ("policy.c", "prompt[i] - cached[i]", "0.0f * (prompt[i] - cached[i])"),
    "python": ("policy.py", "p - c for", "0.0 * p for"),
    "js": ("policy.js", "columns[i] - columns[candidates + i]", "0 * columns[i]"),
}
# The others build with compilers and interpreters that take minutes.
CORE = ("rust", "c")
LANGUAGES = [pytest.param(name, marks=[] if name in CORE else pytest.mark.exhaustive) for name in KEYS]
# What a component with an interpreter needs, as its `policy.toml` says.
MEMORY_MIB = 128
SLOTS = ("dispatch", "eviction", "budget")


def meridian(*args: str, cwd: Path) -> dict[str, Any]:
    """Run the command with a Rust that can build components; its last line of JSON."""
    script = f'. "$({ROOT}/scripts/fetch.sh wasm32)"; exec {ROOT}/target/release/meridian --json "$@"'
    run = subprocess.run(("bash", "-c", script, "bash", *args), cwd=cwd, capture_output=True, text=True)
    assert run.returncode == 0, f"{args}: {run.stdout}{run.stderr}"
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the policies of these tests are made, with those in Rust."""
    folder = tmp_path_factory.mktemp("languages")
    for slot in SLOTS:
        meridian("policy", "new", f"rust-{slot}", "--lang", "rust", "--slot", slot, cwd=folder)
        meridian("policy", "build", f"rust-{slot}", "--out", "rust", cwd=folder)
    return folder


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_new_policy_passes_its_tests_and_answers_as_in_rust(made: Path, language: str) -> None:
    for slot in SLOTS:
        name = f"{language}-{slot}"
        if language != "rust":
            meridian("policy", "new", name, "--lang", language, "--slot", slot, cwd=made)
        # A busy machine says nothing about a policy.
        args = ("--deadline-ms", "1000", "--same-as", f"rust/rust-{slot}.wasm", "--batches", "300")
        tested = meridian("policy", "test", name, *args, cwd=made)
        assert tested["ok"]
        (found,) = tested["slots"]
        assert found["slot"] == slot
        assert len(found["cases"]) == 2
        assert any("the same answers as" in held["name"] for held in found["properties"])


@pytest.mark.parametrize("language", LANGUAGES)
def test_fcfs_in_every_language_is_stock(
    made: Path, engine: Engine, stock_tokens: list[list[int]], language: str
) -> None:
    name = f"{language}-fcfs"
    meridian("policy", "new", name, "--lang", language, cwd=made)
    source, key, same = KEYS[language]
    code = (made / name / source).read_text()
    assert code.count(key) == 1
    (made / name / source).write_text(code.replace(key, same))
    meridian("policy", "build", name, "--out", name, cwd=made)
    with engine.using(engine.native(str(made / name / f"{name}.wasm"), memory_mib=MEMORY_MIB)) as native:
        assert engine.generate(requests(24)) == stock_tokens
        status = json.loads(native.policies.status())["slots"][0]
        assert not any(count for _, count in status["faults"])
        assert status["active"]["source"].endswith(f"{name}.wasm")
        assert native.stats()["requests"] == 0
        native.policies.close()
