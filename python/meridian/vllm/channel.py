"""The channel between the scheduling process and the sampling processes: Unix datagrams in the user's own folder.

Workers in the scheduler's process and separate workers use the same channel. A datagram that is sent before a step is
dispatched has arrived when the step samples. Every datagram is signed (`meridian.vllm.signing`). Records are
meridian-core's `Order` and `Report`. Before them, the scheduler sends how its configuration ends thinking, so that all
processes use one configuration.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import stat
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from meridian._native import ConfigError
from meridian.vllm.signing import ORDERS, OVERHEAD, REPORTS, Signer, Verifier, make_key, read_key

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from meridian.config import ModelConfig

# Longest path that a Unix socket may have.
_MAX_PATH = 107
_MAX_DATAGRAM = 1 << 16
# Sizes of the records of meridian-core: `Order::BYTES`, `Report::BYTES`.
_ORDER_BYTES, _REPORT_BYTES = 17, 22
# Largest datagram of records, whole numbers of either; more of them are split between records.
_RECORDS_BYTES = _ORDER_BYTES * _REPORT_BYTES * 112
# Prefix of the datagram that carries the model's configuration; no record begins with it.
MODEL = b"meridian-model "
# The fields of the table `[model]` that samplers need.
_MODEL_FIELDS = (
    "family",
    "think_start",
    "think_end",
    "resumes",
    "tool_call",
    "tool_call_ends_thinking",
    "force_phrase",
    "interrupt",
    "eos_guard",
    "min_answer_tokens",
)
# Most orders that a sampler has not taken; a sampler with more counts as gone.
_MAX_PENDING = 4096
# Most datagrams and bytes that one call takes, so that a fast sender cannot delay a step; the next step takes the rest.
# An engine sends far less in a step: 22 bytes for each thinking request, or for each of its drafts.
_MAX_TAKEN = 256
_MAX_TAKEN_BYTES = 1 << 18
# A socket that another process is just creating looks like an abandoned one.
_SETTLED_S = 60


def private_folder(name_bytes: int) -> Path:
    """A folder that only this user can enter, with room for a name in a socket's path."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    candidates = [Path(runtime) / "meridian"] if runtime and Path(runtime).is_dir() else []
    candidates += [Path.home() / ".cache" / "meridian" / "run"]
    candidates += [Path(tempfile.gettempdir()) / f"meridian-{os.getuid()}"]
    for folder in candidates:
        if len(os.fsencode(folder)) + 1 + name_bytes > _MAX_PATH:
            continue
        try:
            folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            found = folder.lstat()
        except OSError:
            continue
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return folder
    raise OSError(f"no private folder for sockets among {', '.join(map(str, candidates))}")


def _machine() -> str:
    """A name that distinguishes this machine or container from others with the same home folder."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:8]


def _engine_name(vllm_config: VllmConfig) -> str:
    """A name that only the scheduler and the workers of one engine share (vllm/config/vllm.py: `instance_id`).

    The engines of one `vllm serve` have the same `instance_id`, and those of a dense model also the same
    `data_parallel_rank`, 0 (vllm/config/parallel.py: `reconfigure_for_independent_dp_rank`). Their index differs.
    """
    parallel = vllm_config.parallel_config
    return f"{_machine()}-{vllm_config.instance_id}-{parallel.data_parallel_index}"


def _remove_left(folder: Path) -> None:
    """Remove the sockets of killed processes of this machine; no process receives on them."""
    for path in (*folder.glob(f"{_machine()}-*.schedule"), *folder.glob(f"{_machine()}-*.sample")):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            found = path.lstat()
            if not stat.S_ISSOCK(found.st_mode) or time.time() - found.st_mtime < _SETTLED_S:
                continue
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
                _key_of(path).unlink(missing_ok=True)


def _key_of(sampler: str | Path) -> Path:
    """The file with the key of the sampler with this socket."""
    return Path(sampler).with_suffix(".key")


class ToSamplers:
    """The scheduler's end."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        name = f"{_engine_name(vllm_config)}.schedule"
        folder = private_folder(len(name) + 8)
        self._paths = [str(path) for path in sorted(folder.glob(f"{_engine_name(vllm_config)}-*.sample"))]
        self._pending: dict[str, deque[bytes]] = {path: deque() for path in self._paths}
        self._keys: dict[str, bytes | None] = dict.fromkeys(self._paths)
        self._signer, self._verifier = Signer(ORDERS), Verifier(REPORTS)
        _remove_left(folder)
        self._own = folder / name
        self._socket = _bound(self._own)
        self._inode = self._own.lstat().st_ino

    @property
    def count(self) -> int:
        """The number of samplers."""
        return len(self._paths)

    @property
    def refused(self) -> int:
        """The number of datagrams that no sampler of this engine signed."""
        return self._verifier.refused

    def configure(self, model: ModelConfig | None) -> None:
        """Make every sampler end thinking as `model` says; None restores its own configuration.

        Raises:
            ConfigError: the texts are too long for a datagram.
        """
        fields = None if model is None else {name: getattr(model, name) for name in _MODEL_FIELDS}
        datagram = MODEL + json.dumps(fields).encode()
        if len(datagram) > _MAX_DATAGRAM:
            raise ConfigError(f"model: texts of {len(datagram)} bytes: must be at most {_MAX_DATAGRAM} together")
        for pending in self._pending.values():
            pending.append(datagram)
        self.tell(None)

    def tell(self, orders: bytes | None) -> None:
        """Send orders to every sampler, after the orders that it has not taken yet."""
        for path, pending in self._pending.items():
            if orders:
                pending.extend(orders[i : i + _RECORDS_BYTES] for i in range(0, len(orders), _RECORDS_BYTES))
            while len(pending) > _MAX_PENDING:
                pending.popleft()
            while pending:
                key = self._keys[path] = self._keys[path] or read_key(_key_of(path))
                if key is None:
                    break
                try:
                    self._socket.sendto(self._signer.signed(key, pending[0]), path)
                except BlockingIOError:
                    break
                except OSError:
                    # Another process with this name has another key.
                    self._keys[path] = None
                    break
                pending.popleft()

    def received(self) -> list[bytes]:
        """Datagrams from the samplers since the last call, the oldest first: at most `_MAX_TAKEN` datagrams, and no
        more after `_MAX_TAKEN_BYTES` bytes."""
        reads_again = True
        payloads: list[bytes] = []
        for datagram, sender in _drain(self._socket):
            # The address only chooses the key.
            payload = None
            if sender in self._keys:
                key = self._keys[sender] = self._keys[sender] or read_key(_key_of(sender))
                payload = self._verifier.opened(key, datagram)
                if payload is None and reads_again:
                    reads_again = False
                    self._keys[sender] = read_key(_key_of(sender))
                    payload = self._verifier.opened(self._keys[sender], datagram)
            if payload is None:
                self._verifier.refuse()
            else:
                payloads.append(payload)
        return payloads

    def close(self) -> None:
        """Let go of the socket."""
        _close(self._socket, self._own, self._inode)


class ToScheduler:
    """A sampler's end."""

    def __init__(self, vllm_config: VllmConfig, rank: int) -> None:
        engine = _engine_name(vllm_config)
        name = f"{engine}-{rank}.sample"
        folder = private_folder(len(name) + 8)
        self._path = str(folder / f"{engine}.schedule")
        self._own = folder / name
        # Before the socket: a scheduler that finds the socket also finds the key.
        self._key = make_key(_key_of(self._own))
        self._signer, self._verifier = Signer(REPORTS), Verifier(ORDERS)
        self._socket = _bound(self._own)
        self._inode = self._own.lstat().st_ino

    @property
    def refused(self) -> int:
        """The number of datagrams that no scheduler of this engine signed."""
        return self._verifier.refused

    def tell(self, report: bytes) -> None:
        """Send measurements; without a listening scheduler, they are dropped."""
        with contextlib.suppress(OSError):
            for i in range(0, len(report), _RECORDS_BYTES):
                signed = self._signer.signed(self._key, report[i : i + _RECORDS_BYTES])
                self._socket.sendto(signed, self._path)

    def received(self) -> list[bytes]:
        """Orders since the last call, within the limits of `ToSamplers.received`."""
        payloads: list[bytes] = []
        for datagram, _ in _drain(self._socket):
            payload = self._verifier.opened(self._key, datagram)
            if payload is None:
                self._verifier.refuse()
            else:
                payloads.append(payload)
        return payloads

    def close(self) -> None:
        """Let go of the socket and the key."""
        _close(self._socket, self._own, self._inode, _key_of(self._own))

    def __del__(self) -> None:
        if hasattr(self, "_inode"):
            self.close()


def _bound(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        made.setblocking(False)
        path.unlink(missing_ok=True)
        made.bind(str(path))
    except OSError:
        made.close()
        raise
    return made


def _drain(bound: socket.socket) -> list[tuple[bytes, str]]:
    """Datagrams, and the paths of their senders."""
    datagrams: list[tuple[bytes, str]] = []
    taken = 0
    while len(datagrams) < _MAX_TAKEN and taken < _MAX_TAKEN_BYTES:
        try:
            datagram, sender = bound.recvfrom(_MAX_DATAGRAM + OVERHEAD)
        except OSError:
            break
        datagrams.append((datagram, sender if isinstance(sender, str) else ""))
        taken += len(datagram)
    return datagrams


def _close(bound: socket.socket, path: Path, inode: int, key: Path | None = None) -> None:
    # Another process may have taken over the name.
    with contextlib.suppress(OSError):
        if path.lstat().st_ino == inode:
            path.unlink()
            if key is not None:
                key.unlink(missing_ok=True)
    bound.close()
