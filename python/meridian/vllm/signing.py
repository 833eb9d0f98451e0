"""Signatures of the datagrams between the scheduler and the samplers of one engine.

Each sampler makes a key when it binds its socket. The key lies beside the socket, in a folder that only this user can
enter, in a file that only this user can read. The scheduler signs its orders with it, and the sampler its reports. A
datagram is a tag, a session, a number in it, and the payload. A receiver takes each number of a session once and in
order, so a copy of an earlier datagram is refused as well.

A process of the same user that may read the folder can read the keys, as it may read the memory of the engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import stat
from collections import OrderedDict
from pathlib import Path

logger = logging.getLogger("vllm.meridian")

_TAG_BYTES, _SESSION_BYTES, _NUMBER_BYTES = 16, 8, 8
_KEY_BYTES = 32
# Bytes of a datagram beside its payload.
OVERHEAD = _TAG_BYTES + _SESSION_BYTES + _NUMBER_BYTES
ORDERS, REPORTS = b"meridian-orders", b"meridian-reports"
# Sessions that a receiver remembers. A session is one start of a sender.
_MOST_SESSIONS = 1024


def _tag(key: bytes, use: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_TAG_BYTES, key=key, person=use).digest()


class Signer:
    """Signs the datagrams of one sender; `use` is ORDERS or REPORTS."""

    def __init__(self, use: bytes) -> None:
        self._use = use
        self._session = os.urandom(_SESSION_BYTES)
        self._number = 0

    def signed(self, key: bytes, payload: bytes) -> bytes:
        """The datagram for a receiver with this key."""
        self._number += 1
        body = self._session + self._number.to_bytes(_NUMBER_BYTES, "big") + payload
        return _tag(key, self._use, body) + body


class Verifier:
    """Takes the payloads of signed datagrams, each once and in order, and counts the others."""

    def __init__(self, use: bytes) -> None:
        self._use = use
        # The latest number of each session.
        self._sessions: OrderedDict[bytes, int] = OrderedDict()
        self.refused = 0
        self._logged = 0

    def opened(self, key: bytes | None, datagram: bytes) -> bytes | None:
        """The payload; None for a datagram that was not signed with this key, or not now."""
        tag, body = datagram[:_TAG_BYTES], datagram[_TAG_BYTES:]
        if key is None or len(datagram) < OVERHEAD or not hmac.compare_digest(tag, _tag(key, self._use, body)):
            return None
        session = body[:_SESSION_BYTES]
        number = int.from_bytes(body[_SESSION_BYTES : _SESSION_BYTES + _NUMBER_BYTES], "big")
        if number <= self._sessions.get(session, 0):
            return None
        self._sessions[session] = number
        if len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return body[_SESSION_BYTES + _NUMBER_BYTES :]

    def refuse(self) -> None:
        """Count a refused datagram; the log has each doubling of the count."""
        self.refused += 1
        if self.refused >= max(2 * self._logged, 1):
            self._logged = self.refused
            logger.warning("meridian: %d datagrams that no part of this engine signed were refused", self.refused)


def make_key(path: Path) -> bytes:
    """Make a key in a file that only this user can read; it replaces an earlier one."""
    key = os.urandom(_KEY_BYTES)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    opened = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.write(opened, key)
    finally:
        os.close(opened)
    new.replace(path)
    return key


def read_key(path: Path) -> bytes | None:
    """The key in a file of this user that nobody else can read; None if there is none."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        found = os.fstat(opened)
        private = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
        key = os.read(opened, _KEY_BYTES + 1) if private else b""
    except OSError:
        return None
    finally:
        os.close(opened)
    return key if len(key) == _KEY_BYTES else None
