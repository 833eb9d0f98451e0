"""Mooncake's transfer engine for `meridian-memory`, which starts this module as a process.

The process (`python -m meridian.mooncake_process`) maps memory of the process that started it, and reads the memory of
peers into it. A request is a line on standard input:

    register BYTES PATH       map this memory and register it; answers its address
    read COUNT SESSION        then COUNT lines, `LOCAL REMOTE BYTES`: copy from the peer

Each answer is a line on standard output that begins with `meridian ok` or `meridian error`. The process ends with its
input.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

HOST = "127.0.0.1"


class Memories:
    """What was mapped; kept for as long as the process."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._mapped: list[tuple[mmap.mmap, Any]] = []

    def register(self, bytes_: int, path: str) -> int:
        """Map a memory, register it, and return its address."""
        file = os.open(path, os.O_RDWR)
        try:
            mapped = mmap.mmap(file, bytes_)
        finally:
            os.close(file)
        view = (ctypes.c_char * bytes_).from_buffer(mapped)
        address = ctypes.addressof(view)
        if self._engine.register_memory(address, bytes_) != 0:
            raise ValueError(f"register_memory: {path}: Mooncake refused {bytes_} bytes")
        self._mapped.append((mapped, view))
        return address


def read(engine: Any, session: str, parts: list[tuple[int, int, int]]) -> None:
    """Copy all parts from a peer, and wait for them."""
    local, remote, lengths = (list(column) for column in zip(*parts, strict=True))
    if engine.batch_transfer_sync_read(session, local, remote, lengths) != 0:
        raise ValueError(f"the read of {len(parts)} blocks from {session} failed")


def answers(engine: Any, requests: TextIO) -> Iterator[str]:
    """The answer to each request."""
    memories = Memories(engine)
    for line in requests:
        words = line.rstrip("\n").split(" ", 2)
        try:
            match words:
                case ["register", size, path]:
                    yield f"ok {memories.register(int(size), path)}"
                case ["read", count, session]:
                    rows = [requests.readline().split() for _ in range(int(count))]
                    read(engine, session, [(int(local), int(remote), int(size)) for local, remote, size in rows])
                    yield "ok"
                case _:
                    yield f"error unknown request {words[0]!r}"
        except (OSError, ValueError) as error:
            yield f"error {' '.join(str(error).split())}"


def main() -> int:
    """Start the engine on loopback, tell its name, and serve."""
    try:
        # Not a dependency of the wheel: only who moves blocks over Mooncake has it.
        module = importlib.import_module("mooncake.engine")
    except ImportError as error:
        print(f"meridian error mooncake.engine: {error}", flush=True)
        return 1
    engine = module.TransferEngine()
    if engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") != 0:
        print("meridian error TransferEngine.initialize failed", flush=True)
        return 1
    print(f"meridian ok {HOST}:{engine.get_rpc_port()}", flush=True)
    for answer in answers(engine, sys.stdin):
        print(f"meridian {answer}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
