"""Nothing that users can name was lost: `bench/results/surface.txt` has the names of an earlier commit."""

import sys
from pathlib import Path

from surface import surface

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "bench" / "results" / "surface.txt"
# Names that went on purpose: the reason, and the names of the stored file.
REMOVED = {
    "entropies are always in bits; the unit was a second name for the same thresholds": (
        "config entropy.unit",
        'config entropy.unit = "bits"',
        'config entropy.unit = "nats"',
        "python meridian.EntropyConfig(unit=)",
        "python meridian.EntropyConfig.unit",
    ),
    "a grid's runs are as long as the lives of requests ask for, and its intervals come from batches of them": (
        "option meridian bench grid --requests",
        "option meridian bench grid --seeds",
    ),
    "`tiered-lru`, the default, preempts by the same rule, and both leave cached blocks to the host": (
        "policy eviction native:least-computed-first",
    ),
}


def lost(stored: list[str], found: list[str]) -> list[str]:
    """Stored names that are gone for no reason."""
    removed = {name for names in REMOVED.values() for name in names}
    return sorted(set(stored) - set(found) - removed)


def test_every_earlier_name_is_there() -> None:
    command = Path(sys.executable).with_name("meridian")
    assert command.exists(), f"{command}: no such file: run `make wheel` first"
    stored, found = STORED.read_text().splitlines(), surface(command)
    assert stored == sorted(set(stored))
    # Each kind of name was looked for.
    kinds = {"command", "option", "config", "policy", "metric", "request", "route", "python"}
    assert {name.split()[0] for name in found} == kinds
    assert lost(stored, found) == []


def test_a_removal_names_stored_names() -> None:
    stored = STORED.read_text().splitlines()
    assert [name for names in REMOVED.values() for name in names if name not in stored] == []


def test_a_lost_name_is_found() -> None:
    stored = STORED.read_text().splitlines()
    assert lost(stored, [name for name in stored if name != "command meridian top"]) == ["command meridian top"]
