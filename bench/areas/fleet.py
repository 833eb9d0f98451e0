"""Area `fleet`: many engines. Each module has the parts of one concern."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from areas import fleet_dp, fleet_experiment, fleet_rollout
from areas.common import Figure


def parts(pairs: int) -> dict[str, Callable[[], Iterator[Figure]]]:
    """Parts of the area by name."""
    modules = (fleet_experiment, fleet_rollout)
    rest = {name: lambda part=part: part(pairs) for module in modules for name, part in module.PARTS.items()}
    return {**fleet_dp.parts(pairs), **rest}
