"""Is every step under `native:fcfs` stock vLLM's, by lists and by plug-ins?

Random sequences through vLLM's own scheduler and KV cache manager without a model, as the tests drive them
(random_sequences.py), on the vLLM of the Python that runs this; its plug-ins are a stand-in (plugin_stand_in.py).
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from meridian.vllm.bench.model import model_dir

from checks.engine.preemptions import DRIVES


def measure(sequences: int = 300) -> dict[str, Any]:
    """Of so many sequences, with every feature in turn, those that do in every step what stock does."""
    import vllm

    logging.getLogger("vllm").setLevel(logging.ERROR)
    sys.path.insert(0, str(DRIVES))
    from plugin_stand_in import installed
    from random_engine import FEATURES
    from random_sequences import FCFS, decided, first_difference, stock

    model = str(model_dir())
    equal = {"lists": 0, "stand_in": 0, "plug_ins": 0}
    differences: list[str] = []
    for i in range(sequences):
        feature, seed = FEATURES[i % len(FEATURES)], i // len(FEATURES)
        own = stock(feature, seed, model)
        drives = {"lists": decided(FCFS, feature, seed, model, Path())}
        with installed():
            drives["stand_in"] = stock(feature, seed, model)
            drives["plug_ins"] = decided(FCFS, feature, seed, model, Path())
        for name, drive in drives.items():
            # What stock itself violates is vLLM's own.
            wrong = first_difference(drive, own) or next(iter(set(drive.violations) - set(own.violations)), None)
            equal[name] += wrong is None
            differences += [] if wrong is None else [f"{name}: {wrong}"]
    return {"vllm": vllm.__version__, "sequences": sequences, **equal, "differences": differences[:10]}
