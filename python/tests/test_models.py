"""Model families against the tokenizers of real models."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def resolve(*args: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "meridian", "models", "resolve", "--json", *args],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize(("family", "ids"), [("qwen3", [[151667], [151668]]), ("deepseek-v4", [[128821], [128822]])])
def test_the_real_tokenizer_gives_the_expected_ids(tokenizers: Path, family: str, ids: list[list[int]]) -> None:
    code, resolved = resolve("--family", family, "--tokenizer", str(tokenizers / family))
    assert (code, resolved["ok"]) == (0, True)
    assert [marker["ids"] for marker in resolved["markers"]] == ids


def test_another_family_is_refused_with_both_lists_of_ids(tokenizers: Path) -> None:
    code, refused = resolve("--family", "deepseek-v4", "--tokenizer", str(tokenizers / "qwen3" / "tokenizer.json"))
    assert code == 1
    assert refused["error"] == (
        'deepseek-v4: "<think>": the tokenizer gives [151667], expected [128821]: not a tokenizer of this family'
    )


@pytest.mark.parametrize("family", ["qwen3", "deepseek-v4"])
def test_only_the_right_family_fits(tokenizers: Path, family: str) -> None:
    code, tried = resolve("--tokenizer", str(tokenizers / family))
    assert code == 0
    assert [row["family"] for row in tried["families"] if row["fit"] == "fits"] == [family]
    single = {row["family"]: row["single_tokens"] for row in tried["families"]}
    assert single[family] == ["<think>", "</think>"]
    assert single["gpt-oss"] == []
