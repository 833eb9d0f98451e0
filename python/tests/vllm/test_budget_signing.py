"""Nothing but the scheduler gives a sampler an order, and nothing but a sampler measures: forged datagrams and rows."""

from __future__ import annotations

import os
import pickle
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_budget_channel import RECORD, engine, home, order
from test_budget_rows import END, NO_LIMIT, START, Wire, make_sampler, planned

__all__ = ["home"]

Forge = Callable[[bytes, bytes, bytes], bytes]


def _unsigned(_genuine: bytes, payload: bytes, _use: bytes) -> bytes:
    return payload


def _wrong_key(_genuine: bytes, payload: bytes, use: bytes) -> bytes:
    from meridian.vllm.signing import Signer

    return Signer(use).signed(os.urandom(32), payload)


def _changed(genuine: bytes, _payload: bytes, _use: bytes) -> bytes:
    return genuine[:-1] + bytes([genuine[-1] ^ 1])


def _renumbered(genuine: bytes, _payload: bytes, _use: bytes) -> bytes:
    return genuine[:31] + bytes([genuine[31] + 1]) + genuine[32:]


FORGERIES: dict[str, Forge] = {
    "unsigned": _unsigned,
    "another key": _wrong_key,
    "another payload": _changed,
    "a later number": _renumbered,
    "replayed": lambda genuine, _payload, _use: genuine,
    "cut": lambda genuine, _payload, _use: genuine[:-1],
    "longer": lambda genuine, payload, _use: genuine + payload,
    "only a tag": lambda genuine, _payload, _use: genuine[:16],
    "empty": lambda _genuine, _payload, _use: b"",
    "zeros": lambda _genuine, payload, _use: bytes(32) + payload,
}


def sends(path: str, datagram: bytes) -> None:
    """Send as anybody would who has found the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as anybody:
        anybody.sendto(datagram, path)


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_forged_order_is_refused(home: Path, kind: str) -> None:
    from meridian.vllm.channel import ToSamplers, ToScheduler
    from meridian.vllm.signing import ORDERS

    rank, samplers = ToScheduler(engine(), 0), ToSamplers(engine())
    genuine: list[bytes] = []
    real = samplers._signer.signed

    def signed(key: bytes, payload: bytes) -> bytes:
        genuine.append(real(key, payload))
        return genuine[-1]

    samplers._signer.signed = signed  # type: ignore[method-assign]
    samplers.tell(order(1))
    assert rank.received() == [order(1)]
    forged = FORGERIES[kind](genuine[0], order(7), ORDERS)
    sends(str(rank._own), forged)
    assert (rank.received(), rank.refused) == ([], 1)
    samplers.tell(order(2))
    assert rank.received() == [order(2)], "the scheduler is heard as before"
    assert rank.refused == 1


@pytest.mark.parametrize("kind", FORGERIES)
@pytest.mark.parametrize("poses", [True, False])
def test_a_forged_report_is_refused(home: Path, kind: str, poses: bool) -> None:
    from meridian.vllm.channel import ToSamplers, ToScheduler
    from meridian.vllm.signing import REPORTS

    rank, samplers = ToScheduler(engine(), 0), ToSamplers(engine())
    genuine: list[bytes] = []
    real = rank._signer.signed

    def signed(key: bytes, payload: bytes) -> bytes:
        genuine.append(real(key, payload))
        return genuine[-1]

    rank._signer.signed = signed  # type: ignore[method-assign]
    rank.tell(b"r" * RECORD)
    assert samplers.received() == [b"r" * RECORD]
    forged = FORGERIES[kind](genuine[0], b"f" * RECORD, REPORTS)
    if poses:
        # From the sampler's own address.
        rank._socket.sendto(forged, rank._path)
    else:
        sends(rank._path, forged)
    assert (samplers.received(), samplers.refused) == ([], 1)
    rank.tell(b"s" * RECORD)
    assert samplers.received() == [b"s" * RECORD]


def test_what_a_sampler_has_signed_is_no_order_and_not_for_another(home: Path) -> None:
    from meridian.vllm.channel import ToSamplers, ToScheduler

    one, other = ToScheduler(engine(), 0), ToScheduler(engine(), 1)
    samplers = ToSamplers(engine())
    sends(str(one._own), one._signer.signed(one._key, order(1)))
    sends(str(other._own), samplers._signer.signed(one._key, order(1)))
    assert (one.received(), other.received()) == ([], [])
    assert (one.refused, other.refused) == (1, 1)


def test_another_process_cannot_give_an_order(home: Path) -> None:
    from meridian.vllm.channel import ToSamplers, ToScheduler

    rank, samplers = ToScheduler(engine(), 0), ToSamplers(engine())
    script = (
        "import os, socket, sys\n"
        "from meridian.vllm.signing import ORDERS, Signer\n"
        "out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "signer = Signer(ORDERS)\n"
        "for _ in range(100): out.sendto(signer.signed(os.urandom(32), bytes(17)), sys.argv[1])\n"
    )
    sent = subprocess.Popen([sys.executable, "-c", script, str(rank._own)])
    taken: list[bytes] = []
    while sent.poll() is None or rank.refused < 100:
        taken += rank.received()
    assert (sent.returncode, taken, rank.refused) == (0, [], 100)
    samplers.tell(order(3))
    assert rank.received() == [order(3)]


def test_refusals_are_logged_at_each_doubling_without_the_key(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    from meridian.vllm.channel import ToScheduler

    rank = ToScheduler(engine(), 0)
    with caplog.at_level("WARNING", logger="vllm.meridian"):
        for _ in range(100):
            sends(str(rank._own), bytes(64))
            assert rank.received() == []
    counts = [record.args[0] for record in caplog.records if isinstance(record.args, tuple) and record.args]
    assert counts == [1, 2, 4, 8, 16, 32, 64]
    assert rank._key.hex() not in caplog.text
    assert repr(rank._key) not in caplog.text


def test_a_key_is_the_users_alone_and_goes_with_its_socket(home: Path) -> None:
    from meridian.vllm.channel import ToScheduler, _key_of
    from meridian.vllm.signing import read_key

    rank = ToScheduler(engine(), 0)
    file = _key_of(rank._own)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_key(file) == rank._key
    file.chmod(0o640)
    assert read_key(file) is None, "a group may read it"
    file.chmod(0o600)
    link = file.with_name("link.key")
    link.symlink_to(file)
    assert read_key(link) is None
    file.write_bytes(b"short")
    assert read_key(file) is None
    rank.close()
    assert not file.exists()


def test_a_sampler_takes_no_row_but_the_schedulers() -> None:
    from meridian.vllm.xargs import ROW, Row, row_of
    from vllm import SamplingParams

    genuine = planned(7, 0, [])
    forged: list[Any] = [
        dict(genuine[ROW]),
        msgspec.msgpack.decode(msgspec.msgpack.encode(dict(genuine[ROW]))),
        {"probe": 7, "at": 0},
        [["key", 7]],
        "key",
        7,
        True,
        type("Row", (dict,), {})(genuine[ROW]),
    ]
    for row in forged:
        sampler = make_sampler(Wire())
        params = SamplingParams(extra_args={ROW: row})
        assert row_of(params.extra_args) is None
        assert not sampler.add(0, params, [START], []), f"{row!r} is no order"
        assert sampler.rows.step(1, None)[0] == []
    sampler = make_sampler(Wire())
    assert sampler.add(0, SamplingParams(extra_args=pickle.loads(pickle.dumps(genuine))), [START], [])
    assert sampler.rows.step(1, None)[:2] == ([0], [END])
    assert type(genuine[ROW]) is Row


def test_what_arrives_from_a_client_holds_no_row() -> None:
    from meridian.vllm.xargs import ROW, row_of
    from vllm import SamplingParams
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    params = SamplingParams(extra_args=planned(7, NO_LIMIT, []))
    arrived = MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(params))
    assert row_of(arrived.extra_args) is None
    assert ROW in arrived.extra_args


def test_vllms_own_budget_is_left_to_it_without_a_scheduler() -> None:
    from vllm import SamplingParams

    extra = {"meridian_think_budget": 3}
    sampler = make_sampler(Wire())
    assert not sampler.add(0, SamplingParams(extra_args=extra, thinking_token_budget=5), [START], [])
    assert sampler.add(0, SamplingParams(extra_args=extra), [START], [])
