"""The channel between the process that schedules and those that sample: real Unix sockets, no engine."""

from __future__ import annotations

import gc
import os
import random
import shutil
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_budget_rows import END, EOS, NO_LIMIT, START, limit_order, limits

RECORD = 17


def engine(name: str = "abcde", rank: int = 0) -> Any:
    """What the channel reads of vLLM's configuration."""
    return SimpleNamespace(instance_id=name, parallel_config=SimpleNamespace(data_parallel_index=rank))


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folders of the user's own, with paths that are short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="m", dir="/tmp"))
    (folder / "run").mkdir(mode=0o700)
    (folder / "temporary").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "run"))
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "temporary"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("size", [17, 34_816, 65_536])
def test_a_step_takes_in_a_part_of_an_endless_flood(size: int) -> None:
    from meridian.vllm.channel import _drain

    class Flood:
        taken = 0

        def recvfrom(self, most: int) -> tuple[bytes, str]:
            self.taken += 1
            assert self.taken <= 256
            return bytes(min(size, most)), ""

    flood: Any = Flood()
    # The last datagram may begin just below the bound.
    assert sum(len(datagram) for datagram, _ in _drain(flood)) <= (1 << 18) + (1 << 16)


def sockets(folder: Path) -> list[str]:
    """Names of the sockets in a folder and below, without the machine's."""
    found = (path.name for path in folder.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode))
    return sorted(name.partition("-")[2] for name in found)


def left_behind(path: Path, age_s: float = 0.0) -> None:
    """The socket of a process that was killed so long ago."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left:
        left.bind(str(path))
    then = path.lstat().st_mtime - age_s
    os.utime(path, (then, then))


def order(number: int) -> bytes:
    """A record that can be told from others."""
    return limit_order(number, number, number)


def test_orders_arrive_in_order_at_every_sampler(home: Path) -> None:
    from meridian.vllm.channel import ToSamplers, ToScheduler

    ranks = [ToScheduler(engine(), rank) for rank in range(3)]
    other = ToScheduler(engine("other"), 0)
    replica = ToScheduler(engine(rank=1), 0)
    samplers = ToSamplers(engine())
    assert samplers.count == 3
    for number in range(5):
        samplers.tell(order(number))
    samplers.tell(None)
    samplers.tell(b"")
    for rank in ranks:
        assert rank.received() == [order(number) for number in range(5)]
        assert rank.received() == []
    assert other.received() == []
    assert replica.received() == [], "a replica of the engine is another engine"
    for number, rank in enumerate(ranks):
        rank.tell(bytes([number]) * RECORD)
    assert samplers.received() == [bytes([number]) * RECORD for number in range(3)]


def test_what_is_long_is_cut_between_records(home: Path) -> None:
    from meridian.vllm.channel import ToSamplers, ToScheduler

    rank = ToScheduler(engine(), 0)
    samplers = ToSamplers(engine())
    orders = b"".join(order(number) for number in range(6000))
    samplers.tell(orders)
    rank.tell(orders)
    for datagrams in (rank.received(), samplers.received()):
        assert len(datagrams) > 1
        # Orders have 17 bytes, reports 22.
        assert all(len(datagram) % (RECORD * 22) == 0 for datagram in datagrams[:-1])
        assert b"".join(datagrams) == orders


def test_orders_that_a_sampler_does_not_take_are_kept_and_arrive_later(home: Path) -> None:
    from meridian.vllm.channel import ToSamplers, ToScheduler

    idle, busy = ToScheduler(engine(), 0), ToScheduler(engine(), 1)
    samplers = ToSamplers(engine())
    count = 3000
    taken = []
    for number in range(count):
        samplers.tell(order(number))
        taken += busy.received()
    assert taken == [order(number) for number in range(count)], "one that reads does not wait for one that does not"
    late = idle.received()
    assert 0 < len(late) < count, "the kernel holds some, not all"
    while len(late) < count:
        samplers.tell(None)
        more = idle.received()
        assert more, "nothing more arrives"
        late += more
    assert late == [order(number) for number in range(count)]


def test_orders_for_a_sampler_that_is_gone_do_not_pile_up(home: Path) -> None:
    from meridian.vllm.channel import _MAX_PENDING, ToSamplers, ToScheduler

    gone, there = ToScheduler(engine(), 0), ToScheduler(engine(), 1)
    samplers = ToSamplers(engine())
    gone.close()
    for number in range(_MAX_PENDING + 100):
        samplers.tell(order(number))
        assert there.received() == [order(number)]
    again = ToScheduler(engine(), 0)
    first = None
    for _ in range(_MAX_PENDING):
        samplers.tell(None)
        datagrams = again.received()
        first = first or datagrams[0]
        if not datagrams:
            break
    assert first == order(100), "the oldest were given up"


class Flood:
    """A socket into which somebody who has the key sends faster than it is emptied."""

    def __init__(self, sizes: list[int], use: bytes, key: bytes) -> None:
        from meridian.vllm.signing import Signer

        self.sizes, self.key, self.signer = sizes, key, Signer(use)
        self.taken = 0

    def recvfrom(self, most: int) -> tuple[bytes, str]:
        from meridian.vllm.signing import OVERHEAD

        size = max(self.sizes[self.taken % len(self.sizes)], OVERHEAD + 8)
        self.taken += 1
        assert size <= most
        assert self.taken < 100_000, "it is not emptied while others wait"
        payload = self.taken.to_bytes(8, "little") + bytes(size - 8 - OVERHEAD)
        return self.signer.signed(self.key, payload), "sampler"


@pytest.mark.parametrize(("sizes", "datagrams"), [([17], 256), ([34816], 8), ([65536], 4), ([17, 65536], 8)])
@pytest.mark.parametrize("end", ["scheduler", "sampler"])
def test_a_step_takes_in_so_much_and_the_next_goes_on_there(
    home: Path, end: str, sizes: list[int], datagrams: int
) -> None:
    from meridian.vllm.channel import ToSamplers, ToScheduler
    from meridian.vllm.signing import ORDERS, REPORTS

    key = bytes(range(32))
    one: Any = ToSamplers(engine()) if end == "scheduler" else ToScheduler(engine(), 0)
    if end == "scheduler":
        one._keys["sampler"] = key
    else:
        one._key = key
    real, one._socket = one._socket, Flood(sizes, REPORTS if end == "scheduler" else ORDERS, key)
    numbers = [int.from_bytes(datagram[:8], "little") for _ in range(3) for datagram in one.received()]
    assert numbers == list(range(1, 3 * datagrams + 1)), "nothing is lost, and nothing overtakes"
    one._socket = real
    one.close()


def test_a_report_without_a_scheduler_is_nobodys(home: Path) -> None:
    from meridian.vllm.channel import ToSamplers, ToScheduler

    rank = ToScheduler(engine(), 0)
    for _ in range(2000):
        rank.tell(b"r" * RECORD)
    samplers = ToSamplers(engine())
    assert samplers.received() == []
    rank.tell(b"s" * RECORD)
    assert samplers.received() == [b"s" * RECORD]
    for _ in range(2000):
        # A scheduler that does not read holds nobody up.
        rank.tell(b"t" * RECORD)
    samplers.close()
    rank.tell(b"u" * RECORD)


def garbage(rng: random.Random, keys: list[int]) -> bytes:
    """Any bytes, and records of known keys that make no sense."""
    if rng.random() < 0.5:
        return rng.randbytes(rng.choice([0, 1, 16, 17, 18, 22, 33, 34, 44, 1000]))
    tag = rng.randrange(4, 256)
    record = struct.pack("<BQII", tag, rng.choice(keys), rng.getrandbits(32), rng.getrandbits(32))
    return rng.choice([record, record * 3, record[:-1], limit_order(keys[0], 0, 0)[: rng.randrange(RECORD)]])


def test_garbage_changes_nothing_where_tokens_are_sampled(home: Path) -> None:
    from meridian import _native
    from meridian.vllm.channel import ToScheduler
    from meridian.vllm.markers import TokenMarkers
    from meridian.vllm.signing import ORDERS, Signer

    def rows() -> Any:
        made = _native.BudgetRows()
        made.configure(TokenMarkers([[START]], [[END]]), False)
        for row, limit in enumerate([0, 3, NO_LIMIT]):
            made.add(row, [START], outputs[row], limits(limit, [[5, 6]], key=row + 1, measured=True), True)
        return made

    outputs: list[list[int]] = [[], [], []]
    one, other = rows(), rows()
    rank = ToScheduler(engine(), 0)
    rng = random.Random(0)
    # As of a scheduler that went wrong.
    signer = Signer(ORDERS)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as anybody:
        for step in range(60):
            for _ in range(5):
                signed = signer.signed(rank._key, garbage(rng, [1, 2, 3]))
                anybody.sendto(signed, rank._path.replace(".schedule", "-0.sample"))
            for datagram in rank.received():
                one.receive(datagram)
            found = one.step(3)
            assert found == other.step(3)
            told = [rows.told() for rows in (one, other)]
            assert told[0].datagram([0.5] * 3) == told[1].datagram([0.5] * 3)
            for row, tokens in enumerate(outputs):
                forced = dict(zip(found[0], found[1], strict=True))
                tokens.append(forced.get(row, 100 + step))
    assert [tokens.index(END) if END in tokens else None for tokens in outputs] == [0, 3, None]


def test_garbage_changes_nothing_where_steps_are_planned(home: Path) -> None:
    from meridian import MeridianConfig, _native
    from meridian.vllm.markers import TokenMarkers
    from meridian.vllm.xargs import RequestBudget

    config = MeridianConfig.from_toml('[telemetry]\nprometheus = ""\n[admin]\nlisten = ""\n')
    native = _native.Engine(
        config.to_json(), config.base_dir, markers=TokenMarkers([[START]], [[END]]), block_tokens=16, steps_ahead=0
    )
    thinking = native.follow_thinking([], {10}, {10}, [], True)
    facts = {"prompt": [START], "prompt_tokens": 1, "max_tokens": 90, "arrival_ms": 0.0, "deadline_ms": 1e9}
    client = RequestBudget(max_think_tokens=7)
    enrolled = native.add(object(), "r", **facts, priority=0, tenant="", client=client)
    assert not isinstance(enrolled, bool)
    key = enrolled["key"]
    assert (enrolled["followed"], enrolled["limit"]) == (True, 7)

    def begin(now_ms: float) -> _native.StepPlan | None:
        return native.begin([], None, now_ms, 64, 10, 10, 0, 0, 1, False, True)

    assert begin(0.0) is not None
    before = native.stats()
    rng = random.Random(1)
    for _ in range(3000):
        thinking.received(garbage(rng, [key, key + 1]))
    # What makes sense but is not true: entropies that are none, of tokens that nobody sampled.
    for nats in (float("nan"), float("inf"), -1.0, 1e38):
        for tag in (0, 1, 2):
            thinking.received(
                struct.pack("<BQIfBf", tag, key, rng.getrandbits(32), nats, rng.randrange(4), rng.uniform(-1, 2))
            )
    plan = begin(1.0)
    assert plan is not None
    assert plan.orders is None
    assert thinking.is_thinking(key)
    assert thinking.due() == []
    after = native.stats()
    assert after["budget"] == before["budget"]
    assert after["faults"] == before["faults"]


def test_the_engines_of_a_dense_model_have_channels_of_their_own(home: Path) -> None:
    from meridian.vllm.channel import ToSamplers, ToScheduler
    from vllm.config import ParallelConfig

    def configured(index: int) -> Any:
        # As vLLM makes it for each engine of a model without experts (vllm/v1/engine/core.py: `run_engine_core`).
        parallel = ParallelConfig(data_parallel_size=2)
        parallel.data_parallel_index = index
        parallel.reconfigure_for_independent_dp_rank()
        return SimpleNamespace(instance_id="abcde", parallel_config=parallel)

    samplers = [ToScheduler(configured(index), 0) for index in (0, 1)]
    schedulers = [ToSamplers(configured(index)) for index in (0, 1)]
    try:
        assert [scheduler.count for scheduler in schedulers] == [1, 1]
        for i, scheduler in enumerate(schedulers):
            scheduler.tell(order(i))
        assert [sampler.received() for sampler in samplers] == [[order(0)], [order(1)]]
        assert [end.refused for end in (*samplers, *schedulers)] == [0] * 4
    finally:
        for end in (*samplers, *schedulers):
            end.close()


def test_the_folder_is_the_users_alone(home: Path) -> None:
    from meridian.vllm.channel import ToScheduler

    rank = ToScheduler(engine(), 0)
    folder = home / "run" / "meridian"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sockets(home) == ["abcde-0-0.sample"] == sockets(folder)
    rank.close()


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o770])
def test_a_folder_that_others_may_enter_is_not_used(home: Path, mode: int) -> None:
    from meridian.vllm.channel import ToSamplers, ToScheduler

    open_to_all = home / "run" / "meridian"
    open_to_all.mkdir()
    open_to_all.chmod(mode)
    rank, samplers = ToScheduler(engine(), 0), ToSamplers(engine())
    assert sockets(open_to_all) == []
    assert sockets(home / ".cache" / "meridian" / "run") == ["abcde-0-0.sample", "abcde-0.schedule"]
    assert stat.S_IMODE(open_to_all.stat().st_mode) == mode, "it is left as it is"
    assert samplers.count == 1
    rank.close()


def test_a_link_is_not_used_whatever_it_leads_to(home: Path) -> None:
    from meridian.vllm.channel import ToScheduler

    (home / "private").mkdir(mode=0o700)
    (home / "run" / "meridian").symlink_to(home / "private")
    rank = ToScheduler(engine(), 0)
    assert sockets(home / "private") == []
    assert sockets(home / ".cache") == ["abcde-0-0.sample"]
    rank.close()


def test_a_path_that_is_too_long_is_passed_over(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meridian.vllm.channel import ToSamplers, ToScheduler

    long = home / ("x" * 90)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setenv("HOME", str(long))
    rank, samplers = ToScheduler(engine(), 0), ToSamplers(engine())
    assert sockets(long) == []
    folder = home / "temporary" / f"meridian-{os.getuid()}"
    assert len(sockets(folder)) == 2
    assert samplers.count == 1
    rank.close()


def test_without_any_private_folder_it_says_where_it_looked(home: Path) -> None:
    from meridian.vllm.channel import ToScheduler

    for folder in (home / "run", home / "temporary"):
        for name in ("meridian", f"meridian-{os.getuid()}"):
            (folder / name).write_text("")
    (home / ".cache").write_text("")
    with pytest.raises(OSError, match=r"^no private folder for sockets among .*/run/meridian, .*/temporary/meridian-"):
        ToScheduler(engine(), 0)


def test_sockets_go_when_they_are_let_go(home: Path) -> None:
    from meridian.vllm.channel import ToSamplers, ToScheduler

    rank = ToScheduler(engine(), 0)
    samplers = ToSamplers(engine())
    assert sockets(home) == ["abcde-0-0.sample", "abcde-0.schedule"]
    samplers.close()
    assert sockets(home) == ["abcde-0-0.sample"]
    del rank
    gc.collect()
    assert sockets(home) == []


def test_a_socket_that_a_killed_process_left_behind_is_replaced(home: Path) -> None:
    from meridian.vllm.channel import ToSamplers, ToScheduler, _machine

    folder = home / "run" / "meridian"
    folder.mkdir(mode=0o700)
    for name in ("abcde-0-0.sample", "abcde-0.schedule"):
        left_behind(folder / f"{_machine()}-{name}")
    rank, samplers = ToScheduler(engine(), 0), ToSamplers(engine())
    samplers.tell(order(1))
    assert rank.received() == [order(1)]
    rank.tell(b"r" * RECORD)
    assert samplers.received() == [b"r" * RECORD]


def test_sockets_that_killed_processes_left_behind_go(home: Path) -> None:
    from meridian.vllm.channel import ToSamplers, ToScheduler, _machine

    live = ToScheduler(engine("alive"), 0)
    folder = home / "run" / "meridian"
    for name in ("dead-0-0.sample", "dead-0.schedule"):
        left_behind(folder / f"{_machine()}-{name}", age_s=3600)
    # It may be being made; it may be another machine's; it is no socket.
    left_behind(folder / f"{_machine()}-young-0.schedule")
    left_behind(folder / "00000000-other-0.schedule", age_s=3600)
    (folder / f"{_machine()}-file-0.schedule").write_text("")
    samplers = ToSamplers(engine())
    assert sockets(folder) == ["abcde-0.schedule", "alive-0-0.sample", "other-0.schedule", "young-0.schedule"]
    assert (folder / f"{_machine()}-file-0.schedule").exists()
    samplers.close()
    live.close()


def test_a_sampler_that_is_made_again_is_not_cut_off_by_the_end_of_the_first(home: Path) -> None:
    from meridian.vllm.channel import ToSamplers, ToScheduler

    first = ToScheduler(engine(), 0)
    second = ToScheduler(engine(), 0)
    del first
    gc.collect()
    samplers = ToSamplers(engine())
    samplers.tell(order(EOS))
    assert samplers.count == 1
    assert second.received() == [order(EOS)]
