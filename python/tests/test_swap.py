"""Policies that change while the engine runs, without vLLM."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import meridian
import pytest
from meridian import _native

# What a hang is told by; nothing waits as long.
HANG_S = 60.0


def watches() -> set[str]:
    """This process's threads that watch a file; one may end while they are listed."""
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if "watch" in (thread / "comm").read_text():
                found.add(thread.name)
    return found


def engine(source: str, base_dir: Path, **policy: object) -> meridian.PolicyEngine:
    config = meridian.MeridianConfig(
        policy=meridian.PolicyConfig(dispatch=meridian.SlotConfig(source), **policy),  # type: ignore[arg-type]
        base_dir=str(base_dir),
    )
    made = meridian.PolicyEngine(config)
    for i in range(4):
        made.add(f"r{i}", prompt=[1, 2, 3], max_tokens=10)
    return made


def step(engine: meridian.PolicyEngine, now_ms: float) -> meridian.StepPlan:
    return engine.plan([], ["r0", "r1", "r2", "r3"], token_budget=512, free_seats=4, now_ms=now_ms)


def test_swap_rollback_and_refusal(policies: Path, tmp_path: Path) -> None:
    running = engine("native:output-first", tmp_path)
    report = running.swap(policies / "fcfs.wasm")
    assert (report["active"]["name"], report["previous"]["name"]) == ("fcfs", "output-first")
    assert len(report["active"]["sha256"]) == 64
    step(running, 0.0)
    assert running.stats()["policy"] == "fcfs"
    bad = tmp_path / "bad.wasm"
    bad.write_bytes(b"\0asm but no component")
    with pytest.raises(meridian.PolicyError, match="not a component"):
        running.swap(bad)
    slot = running.status()["slots"][0]
    assert slot["active"]["name"] == "fcfs"
    assert str(bad) in slot["last_refusal"]
    assert dict(slot["faults"])["load"] == 1
    assert running.rollback()["active"]["name"] == "output-first"
    with pytest.raises(meridian.PolicyError, match="no version is in quarantine"):
        running.release()


def test_shadow_and_promote(policies: Path, tmp_path: Path) -> None:
    running = engine("native:output-first", tmp_path)
    running.swap(policies / "fcfs.wasm", mode="shadow")
    for i in range(3):
        step(running, float(i))
    assert running.stats()["policy"] == "output-first"
    assert running.promote()["active"]["name"] == "fcfs"
    with pytest.raises(meridian.PolicyError, match="no shadow"):
        running.promote()


def test_a_shadow_is_stopped(policies: Path, tmp_path: Path) -> None:
    running = engine("native:output-first", tmp_path)
    with pytest.raises(meridian.PolicyError, match="dispatch: there is no shadow to stop"):
        running.stop_shadow()
    running.swap("native:fcfs", mode="shadow")
    assert running.status()["slots"][0]["shadow"]["version"]["source"] == "native:fcfs"
    assert running.stop_shadow()["action"] == "stop-shadow"
    assert running.status()["slots"][0]["shadow"] is None


@pytest.mark.parametrize("source", ["native:fixed-budget", "fixed-budget.wasm"])
def test_options_are_swapped_and_come_back(policies: Path, tmp_path: Path, source: str) -> None:
    source = source if source.startswith("native:") else str(policies / source)
    running = engine("native:output-first", tmp_path, budget=meridian.SlotConfig(source, {"think_tokens": 300}))

    def cap() -> int:
        return running.thresholds([meridian.ThinkingRequest()])[0]["max_think_tokens"]

    assert cap() == 300
    report = running.swap(slot="budget", config={"think_tokens": 200})
    assert (report["active"]["options"], report["previous"]["options"]) == (
        {"think_tokens": 200},
        {"think_tokens": 300},
    )
    assert report["active"]["sha256"] == report["previous"]["sha256"]
    assert cap() == 200
    assert running.status()["slots"][2]["active"]["options"] == {"think_tokens": 200}
    assert running.swap(slot="budget", config={"think_tokens": 200})["action"] == "unchanged"
    # A policy with other options, and the configured one without any.
    running.swap("native:patience", slot="budget", config={"answers": 2})
    assert running.swap(source, slot="budget")["active"]["options"] == {"think_tokens": 300}
    assert cap() == 300
    assert running.rollback("budget")["active"]["options"] == {"answers": 2}
    with pytest.raises(meridian.PolicyError, match="native:patience refused its configuration"):
        running.swap("native:patience", slot="budget", config={"think_tokens": 200})
    with pytest.raises(meridian.PolicyError, match="unknown native policy, expected one of native:eat-rpdi"):
        running.swap("native:fcfs", slot="budget")
    with pytest.raises(ValueError, match="expected a policy, a config or both"):
        running.swap()
    with pytest.raises(ValueError, match="not JSON compliant"):
        running.swap(slot="budget", config={"think_tokens": float("nan")})


def test_a_native_policy_without_options_gets_none(tmp_path: Path) -> None:
    running = engine("native:output-first", tmp_path, budget=meridian.SlotConfig("native:patience", {"answers": 2}))
    assert "options" not in running.swap("native:fixed-budget", slot="budget")["active"]
    assert running.swap("native:patience", slot="budget")["active"]["options"] == {"answers": 2}


def test_the_same_bytes_over_the_watched_file_keep_the_way_back(policies: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.wasm"
    shutil.copy(policies / "output-first.wasm", policy)
    running = engine("policy.wasm", tmp_path)
    running.swap(policies / "fcfs.wasm")
    shutil.copy(policies / "fcfs.wasm", policy)
    assert running.swap(policy)["action"] == "unchanged"
    # The watch may see the copy or only this; neither is a version.
    policy.write_bytes(b"half a file")
    wait_for(running, lambda slot: slot["last_refusal"] is not None)
    slot = running.status()["slots"][0]
    assert (slot["swaps"], slot["active"]["name"], slot["previous"]["name"]) == (1, "fcfs", "output-first")
    assert running.rollback()["active"]["name"] == "output-first"
    running.close()


def test_a_shadows_file_is_watched(policies: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.wasm"
    shutil.copy(policies / "output-first.wasm", policy)
    config = meridian.MeridianConfig(
        policy=meridian.PolicyConfig(dispatch=meridian.SlotConfig("policy.wasm", mode="shadow")), base_dir=str(tmp_path)
    )
    running = meridian.PolicyEngine(config)
    shutil.copy(policies / "fcfs.wasm", policy)
    wait_for(running, lambda slot: slot["shadow"]["version"]["name"] == "fcfs")
    assert running.status()["slots"][0]["active"]["source"] == "native:fcfs"
    running.close()


def test_a_component_that_faults_goes_into_quarantine(hostile: Path, tmp_path: Path) -> None:
    running = engine(str(hostile / "trap.wasm"), tmp_path)
    for i in range(4):
        step(running, float(i))
    slot = running.status()["slots"][0]
    assert slot["active"]["name"] == "balanced"
    assert slot["quarantine"] is not None
    assert running.faults()[-1]["batch"]["columns_bits"] is not None


@pytest.mark.parametrize(("name", "why"), [("init-trap", "unreachable"), ("init-loop", "deadline")])
def test_a_component_that_does_not_start_changes_nothing(hostile: Path, tmp_path: Path, name: str, why: str) -> None:
    running = engine("native:output-first", tmp_path)
    bad = hostile / f"{name}.wasm"
    for mode in ("active", "shadow"):
        with pytest.raises(meridian.PolicyError, match=why):
            running.swap(bad, mode=mode)
        slot = running.status()["slots"][0]
        assert (slot["active"]["name"], slot["shadow"], slot["swaps"]) == ("output-first", None, 0)
        assert slot["last_refusal"].startswith(f"{bad}: ")
        assert why in slot["last_refusal"]
        assert "\n" not in slot["last_refusal"]
    assert dict(slot["faults"])["load"] == 2
    step(running, 0.0)
    assert running.stats()["last_source"] == "policy"


def test_a_watched_file_that_does_not_start_is_said_and_replaced(hostile: Path, policies: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.wasm"
    shutil.copy(policies / "output-first.wasm", policy)
    running = engine("policy.wasm", tmp_path)
    shutil.copy(hostile / "init-trap.wasm", policy)
    wait_for(running, lambda slot: "unreachable" in (slot["last_refusal"] or ""))
    assert running.status()["slots"][0]["active"]["name"] == "output-first"
    step(running, 0.0)
    assert running.stats()["last_source"] == "policy"
    shutil.copy(policies / "fcfs.wasm", policy)
    wait_for_policy(running, "fcfs")
    assert running.status()["slots"][0]["last_refusal"] is None
    running.close()


def wait_for_policy(running: meridian.PolicyEngine, name: str) -> None:
    wait_for(running, lambda slot: slot["active"]["name"] == name)


def wait_for(running: meridian.PolicyEngine, is_so: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until the watch has seen the file: the host logs whatever comes of it, once it is so."""
    while not is_so(running.status()["slots"][0]):
        assert _native.wait_for_log(HANG_S), f"the watch did not see the file: {running.status()['slots'][0]}"
        _native.take_log()


def test_a_file_that_is_replaced_becomes_active(policies: Path, tmp_path: Path) -> None:
    policy, before = tmp_path / "policy.wasm", watches()
    shutil.copy(policies / "output-first.wasm", policy)
    running = engine("policy.wasm", tmp_path)
    assert running.stats()["policy"] == "output-first"
    shutil.copy(policies / "fcfs.wasm", tmp_path / "new.wasm")
    (tmp_path / "new.wasm").rename(policy)
    wait_for_policy(running, "fcfs")
    assert len(watches() - before) == 1
    policy.write_bytes(b"half a file")
    policy.unlink()
    shutil.copy(policies / "noop.wasm", policy)
    wait_for_policy(running, "noop")
    running.close()
    assert watches() <= before


def test_what_is_not_watched_stays(policies: Path, tmp_path: Path) -> None:
    policy, before = tmp_path / "policy.wasm", watches()
    shutil.copy(policies / "output-first.wasm", policy)
    running = engine("policy.wasm", tmp_path, watch=False)
    shutil.copy(policies / "fcfs.wasm", policy)
    assert watches() <= before
    assert running.stats()["policy"] == "output-first"


def test_every_slot_is_swapped_alike(policies: Path, tmp_path: Path) -> None:
    running = engine("native:output-first", tmp_path)
    assert [slot["slot"] for slot in running.status()["slots"]] == ["dispatch", "eviction", "budget"]
    victims = [
        meridian.EvictionCandidate(tier=1, computed_tokens=9),
        meridian.EvictionCandidate(tier=1, computed_tokens=2),
    ]
    assert running.rank_evictions(victims, subject="requests").keys == [9.0, 2.0]
    settled = meridian.ThinkingRequest(is_probed=True, probes=9, eat=0.1, eat_variance=0.0)
    assert running.verdicts([settled, meridian.ThinkingRequest()]) == ["end-now", "keep-thinking"]
    assert running.thresholds([settled])[0]["max_think_tokens"] == meridian.SchedulerConfig().max_think_tokens
    # One component fills both; each slot has an instance of its own.
    for slot in ("eviction", "budget"):
        report = running.swap(policies / "noop.wasm", slot=slot)  # type: ignore[arg-type]
        assert (report["slot"], report["active"]["name"]) == (slot, "noop")
    assert running.rank_evictions(victims, subject="requests").keys == [9.0, 2.0], "left to the default"
    assert running.verdicts([settled]) == ["end-now"]
    decisions = {slot["slot"]: slot["decisions"] for slot in running.status()["slots"]}
    assert (decisions["eviction"], decisions["budget"]) == ([1, 1, 0], [2, 1, 0])
    with pytest.raises(meridian.PolicyError, match="does not fill slot eviction, only dispatch"):
        running.swap(policies / "fcfs.wasm", slot="eviction")
    assert running.rollback("budget")["active"]["name"] == "eat-rpdi"


@pytest.mark.parametrize("name", ["tiered-lru", "prefix-value"])
@pytest.mark.parametrize("source", ["native:{}", "{}.wasm"])
def test_the_request_that_has_computed_least_goes_first(policies: Path, tmp_path: Path, name: str, source: str) -> None:
    source = source.format(name)
    source = source if source.startswith("native:") else str(policies / source)
    running = engine("native:output-first", tmp_path, eviction=meridian.SlotConfig(source, deadline_ms=1000.0))
    victims = [meridian.EvictionCandidate(tier=1, computed_tokens=640), meridian.EvictionCandidate(tier=1, blocks=9)]
    assert running.rank_evictions(victims, subject="requests").keys == [640.0, 0.0]
    assert running.status()["slots"][1]["decisions"] == [1, 0, 0]
    running.close()


@pytest.mark.parametrize("source", ["native:{}", "{}.wasm"])
def test_budget_policies_by_answers_deadline_and_count(policies: Path, tmp_path: Path, source: str) -> None:
    def made(name: str, **config: object) -> meridian.PolicyEngine:
        path = source.format(name)
        path = path if path.startswith("native:") else str(policies / path)
        return engine("native:output-first", tmp_path, budget=meridian.SlotConfig(path, config, deadline_ms=1000.0))

    again = [meridian.ThinkingRequest(same_answers=n) for n in (1, 2)]
    running = made("patience", answers=2)
    assert running.verdicts(again) == ["keep-thinking", "end-now"]
    running.close()

    late = [meridian.ThinkingRequest(slack_ms=99.0), meridian.ThinkingRequest()]
    running = made("deadline-aware", slack_ms=100)
    assert running.verdicts(late) == ["end-now", "keep-thinking"]
    assert [given["min_think_tokens"] for given in running.thresholds(late)] == [0, 512]
    running.close()

    running = made("fixed-budget", think_tokens=1000)
    assert running.thresholds([meridian.ThinkingRequest()])[0]["max_think_tokens"] == 1000
    assert running.verdicts(again) == ["default", "default"]
    running.close()


def test_a_component_in_the_configuration_of_every_slot(policies: Path, tmp_path: Path) -> None:
    noop = str(policies / "noop.wasm")
    running = engine(noop, tmp_path, eviction=meridian.SlotConfig(noop), budget=meridian.SlotConfig(noop))
    assert [slot["active"]["name"] for slot in running.status()["slots"]] == ["noop"] * 3
    running.close()
    with pytest.raises(meridian.PolicyError, match=r"^policy\.budget\.source: .*does not fill slot budget"):
        engine("native:fcfs", tmp_path, budget=meridian.SlotConfig(str(policies / "fcfs.wasm")))


def test_with_trusted_keys_an_unsigned_component_is_refused(policies: Path, tmp_path: Path) -> None:
    key = "RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3"
    running = engine("native:output-first", tmp_path, trusted_keys=[key])
    with pytest.raises(meridian.PolicyError, match="not signed: expected a minisign signature by trusted key E7620F18"):
        running.swap(policies / "fcfs.wasm")
    component = tmp_path / "policy.wasm"
    shutil.copy(policies / "fcfs.wasm", component)
    beside = tmp_path / "policy.wasm.minisig"
    beside.write_text("nonsense")
    for signature in (None, beside):
        with pytest.raises(meridian.PolicyError, match="bad signature: malformed"):
            running.swap(component, signature=signature)
    with pytest.raises(meridian.PolicyError, match=r"policy.dispatch.source: .* bad signature"):
        engine(str(component), tmp_path, trusted_keys=[key])
    with pytest.raises(meridian.ConfigError, match=r'policy.trusted_keys\[0\]: "absent.pub": .*expected a minisign'):
        engine("native:output-first", tmp_path, trusted_keys=["absent.pub"])
