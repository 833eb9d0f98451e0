"""The process that reads memory by Mooncake, with an engine that copies within this process."""

from __future__ import annotations

import ctypes
import io
import os
import sys
from collections.abc import Iterator

import pytest
from meridian import mooncake_process


class Engine:
    """Registers anything of less than a mebibyte; a peer named `gone` does not answer."""

    def __init__(self) -> None:
        self.registered: list[tuple[int, int]] = []

    def register_memory(self, address: int, size: int) -> int:
        if size >= 1 << 20:
            return -1
        self.registered.append((address, size))
        return 0

    def batch_transfer_sync_read(self, session: str, local: list[int], remote: list[int], sizes: list[int]) -> int:
        if session == "gone":
            return -1
        for to, from_, size in zip(local, remote, sizes, strict=True):
            ctypes.memmove(to, from_, size)
        return 0


@pytest.fixture
def memory() -> Iterator[tuple[int, str]]:
    """A memory of two pages, and where another process finds it."""
    file = os.memfd_create("test")
    os.ftruncate(file, 8192)
    yield file, f"/proc/{os.getpid()}/fd/{file}"
    os.close(file)


def answers(engine: Engine, *requests: str) -> list[str]:
    return list(mooncake_process.answers(engine, io.StringIO("".join(f"{line}\n" for line in requests))))


def test_memory_is_mapped_and_registered(memory: tuple[int, str]) -> None:
    file, path = memory
    os.pwrite(file, b"x" * 100, 4096)
    engine = Engine()
    source = ctypes.create_string_buffer(b"y" * 100)
    requests = io.StringIO(f"register 8192 {path}\n")
    stream = mooncake_process.answers(engine, requests)
    base = int(next(stream).removeprefix("ok "))
    assert engine.registered == [(base, 8192)]
    place = requests.tell()
    requests.write(f"read 2 peer\n{base} {ctypes.addressof(source)} 60\n{base + 60} {ctypes.addressof(source)} 40\n")
    requests.seek(place)
    assert next(stream) == "ok"
    assert os.pread(file, 200, 4096 - 100) == b"\0" * 100 + b"x" * 100
    assert os.pread(file, 100, 0) == b"y" * 100


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ("register 2097152 {path}", "error mmap length is greater than file size"),
        ("register 8192 /nowhere", "error [Errno 2] No such file or directory: '/nowhere'"),
        ("register x {path}", "error invalid literal for int() with base 10: 'x'"),
        ("read 1 gone\n1 2 3", "error the read of 1 blocks from gone failed"),
        ("read 1 peer\n1 2", "error not enough values to unpack (expected 3, got 2)"),
        ("write 1 peer", "error unknown request 'write'"),
        ("", "error unknown request ''"),
    ],
)
def test_what_cannot_be_done_is_answered_in_one_line(memory: tuple[int, str], request_: str, error: str) -> None:
    assert answers(Engine(), request_.format(path=memory[1])) == [error]


def test_refused_memory_is_not_kept(memory: tuple[int, str]) -> None:
    file, path = memory
    os.ftruncate(file, 1 << 20)
    (answer,) = answers(Engine(), f"register {1 << 20} {path}")
    assert answer == f"error register_memory: {path}: Mooncake refused {1 << 20} bytes"


def test_without_the_package_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    assert mooncake_process.main() == 1
    assert capsys.readouterr().out.startswith("meridian error mooncake.engine: ")
