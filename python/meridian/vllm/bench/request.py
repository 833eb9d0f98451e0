"""A request as the engine is to serve it, and the rows of a job that list them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class TraceRequest:
    """One request: when it arrives (s) and how many tokens each phase has; the end marker is not counted."""

    arrival_s: float
    prompt_tokens: int  # with the template's own
    think_tokens: int
    output_tokens: int
    tenant: str = ""
    priority: int = 0  # lower is more urgent
    deadline_ms: float | None = None  # after arrival; None for none
    # Which turn of which conversation; None for a request of its own.
    session: int | None = None
    turn: int | None = None


_FIELDS = frozenset(field.name for field in fields(TraceRequest))


def request_of(row: Mapping[str, Any]) -> TraceRequest:
    """A row of a job. Jobs are written by the `meridian` command, which has checked them."""
    return TraceRequest(**{name: value for name, value in row.items() if name in _FIELDS})
