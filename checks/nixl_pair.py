"""NIXL's own transfer, by the Python interface of its wheel: reads of another process's memory, from post to done.

    python -m checks.nixl_pair --blocks 128 --block-bytes 2097152 --rounds 5

The wheel is on PYTHONPATH, and NIXL_PLUGIN_DIR, UCX_NET_DEVICES and UCX_TLS are set. Prints one JSON line a round.
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
import time
from typing import Any

import numpy as np


def agent(name: str) -> Any:
    """An agent with the UCX backend and a thread for progress, as Meridian has one."""
    from nixl_cu12._api import nixl_agent, nixl_agent_config  # ty: ignore  # pyright: ignore

    return nixl_agent(name, nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))


def descriptors(memory: np.ndarray, block_bytes: int) -> list[tuple[int, int, int]]:
    """The blocks of a memory."""
    base = memory.ctypes.data
    return [(base + place, block_bytes, 0) for place in range(0, memory.nbytes, block_bytes)]


def serve(blocks: int, block_bytes: int) -> None:
    """Register memory, tell where it is, and stay until the other side lets go."""
    memory = np.arange(blocks * block_bytes, dtype=np.uint8)
    ours = agent("own-target")
    ours.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    metadata = base64.b64encode(ours.get_agent_metadata()).decode()
    print(json.dumps({"metadata": metadata, "base": memory.ctypes.data}), flush=True)
    sys.stdin.read()


def measure(blocks: int, block_bytes: int, rounds: int) -> None:
    """Read all blocks in one request, as often as asked, after once to open connections and touch memory."""
    command = [sys.executable, __file__, "--serve", "--blocks", str(blocks), "--block-bytes", str(block_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        # NIXL logs to the same stream.
        said = json.loads(next(line for line in other.stdout if line.startswith("{")))
        memory = np.zeros(blocks * block_bytes, dtype=np.uint8)
        ours = agent("own-initiator")
        ours.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        peer = ours.add_remote_agent(base64.b64decode(said["metadata"]))
        local = ours.get_xfer_descs(descriptors(memory, block_bytes), "DRAM")
        there = [(said["base"] + place, block_bytes, 0) for place in range(0, memory.nbytes, block_bytes)]
        remote = ours.get_xfer_descs(there, "DRAM")
        expected = np.arange(memory.nbytes, dtype=np.uint8)
        for turn in range(rounds + 1):
            memory[:] = 0
            request = ours.initialize_xfer("READ", local, remote, peer)
            begun = time.perf_counter()
            state = ours.transfer(request)
            while state == "PROC":
                state = ours.check_xfer_state(request)
            took = time.perf_counter() - begun
            ours.release_xfer_handle(request)
            if state != "DONE":
                sys.exit(f"error: NIXL's transfer ended as {state}")
            if turn:
                row = {"name": "NIXL's own transfer", "round": turn, "gb_s": round(memory.nbytes / took / 1e9, 4)}
                print(json.dumps(row | {"equal": bool((memory == expected).all())}), flush=True)
        other.stdin.close()


def main() -> None:
    """Command line."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--serve", action="store_true", help="be the other process")
    p.add_argument("--blocks", type=int, default=128, help="blocks (default 128)")
    p.add_argument("--block-bytes", type=int, default=2 << 20, help="bytes of a block (default 2 MiB)")
    p.add_argument("--rounds", type=int, default=5, help="transfers (default 5)")
    a = p.parse_args()
    if a.serve:
        serve(a.blocks, a.block_bytes)
    else:
        measure(a.blocks, a.block_bytes, a.rounds)


if __name__ == "__main__":
    main()
