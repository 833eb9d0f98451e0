"""Area `fleet`: many engines. Each module has the parts of one concern."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from areas import fleet_dp
from areas.common import Figure


def parts(pairs: int) -> dict[str, Callable[[], Iterator[Figure]]]:
    """Parts of the area by name."""
    return {**fleet_dp.parts(pairs)}
