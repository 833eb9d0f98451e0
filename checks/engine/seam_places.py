"""Every place of vLLM's scheduler that Meridian uses, and whether the installed vLLM has it."""

from __future__ import annotations

import logging
import sys
from typing import Any

from meridian.vllm.bench.model import model_dir

from checks.run import DRIVES


def measure() -> dict[str, Any]:
    """A row a place of the newest supported version: `lacks` says what is missing. A draft's places are named too, and
    miss only where vLLM has some of them."""
    import vllm
    from meridian.vllm import compat

    logging.getLogger("vllm").setLevel(logging.ERROR)
    sys.path.insert(0, str(DRIVES))
    from random_engine import FEATURES, Limits, make_scheduler

    limits = Limits(seqs=4, tokens=64, blocks=64, adapters=1, encoder=0, long_prefill=0)
    scheduler = make_scheduler(FEATURES[0], limits, str(model_dir()))
    has_plug_ins = hasattr(scheduler, "scheduler_plugin_manager")
    rows = [
        {
            "seam": place.seam,
            "path": place.path,
            "since": ".".join(map(str, place.since)),
            "later": place.later,
            "draft": place.is_draft,
            "lacks": compat.lacks(scheduler, place) if has_plug_ins or not place.is_draft else "",
        }
        for place in compat.PLACES
        if place.until == compat.SUPPORTED[1]
    ]
    return {"vllm": vllm.__version__, "seams": compat.choose_seams(scheduler).name, "places": rows}
