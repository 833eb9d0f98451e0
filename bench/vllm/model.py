#!/usr/bin/env python3
"""The demo's model, made in the cache on first use. As a script, prints its folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

MAKE = Path(__file__).resolve().parents[2] / "models" / "tiny-random" / "make.py"


def model_dir() -> Path:
    """The model's folder; its name changes with the script that makes it.

    Raises:
        subprocess.CalledProcessError: the script failed; `stderr` says why.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meridian"
    cache = Path(os.environ.get("MERIDIAN_CACHE") or default)
    model = cache / "models" / f"tiny-random-{hashlib.sha256(MAKE.read_bytes()).hexdigest()[:12]}"
    if not (model / ".complete").exists():
        print(f"model: making {model}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, str(MAKE), str(model)], check=True, capture_output=True, text=True)
    return model


if __name__ == "__main__":
    print(model_dir())
