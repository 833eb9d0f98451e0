"""One engine: how large the parts are, what exists twice, and whether schedules stayed the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator

from areas.common import ROOT, Bound, Figure, over_pairs, say

# The commit before the crate.
BEFORE = "d71ca9fe4643"
CRATES = ("host/core", "host/wasm", "host/runtime", "host/engine", "host/cli", "bench", "python")
LONGEST_FILE = 500
LONGEST_BINDING = 250


def _files(commit: str) -> dict[str, str]:
    """Texts of the Rust sources at a commit by path, without tests, examples and benches."""
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", commit], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = [x for x in listed.stdout.splitlines() if x.endswith(".rs") and "/src/" in x and x.startswith(CRATES)]
    names = "".join(f"{commit}:{path}\n" for path in paths).encode()
    batch = subprocess.run(["git", "cat-file", "--batch"], cwd=ROOT, capture_output=True, check=True, input=names)
    texts, rest = {}, batch.stdout
    for path in paths:
        head, _, rest = rest.partition(b"\n")
        size = int(head.split()[2])
        texts[path] = rest[:size].decode()
        rest = rest[size + 1 :]
    return texts


def size() -> Iterator[Figure]:
    """Lines by crate, long files, and the places that load policies."""
    before, now = _files(BEFORE), _files("HEAD")

    def lines(texts: dict[str, str]) -> Counter[str]:
        counted: Counter[str] = Counter()
        for path, text in texts.items():
            counted[next(crate for crate in CRATES if path.startswith(crate + "/"))] += text.count("\n")
        return counted

    was, are = lines(before), lines(now)
    for crate in CRATES:
        yield Figure(f"lines of {crate}/src before", was[crate], "lines")
        yield Figure(f"lines of {crate}/src", are[crate], "lines")

    def over(texts: dict[str, str], limit: int, within: str = "") -> int:
        return sum(text.count("\n") > limit for path, text in texts.items() if path.startswith(within))

    yield Figure(f"files over {LONGEST_FILE} lines before", over(before, LONGEST_FILE), "files")
    most = over(before, LONGEST_FILE) - 1
    yield Figure(f"files over {LONGEST_FILE} lines", over(now, LONGEST_FILE), "files", Bound(most))
    yield Figure(
        f"files of python/src over {LONGEST_BINDING} lines before", over(before, LONGEST_BINDING, "python/"), "files"
    )
    yield Figure(
        f"files of python/src over {LONGEST_BINDING} lines", over(now, LONGEST_BINDING, "python/"), "files", Bound(0)
    )

    def loaders(texts: dict[str, str]) -> int:
        starts = re.compile(r"\bRuntime::new\(|component\.policy::<")
        return sum(bool(starts.search(text)) for path, text in texts.items() if not path.startswith("host/wasm/"))

    yield Figure("files that load and start components before", loaders(before), "files")
    yield Figure("files that load and start components", loaders(now), "files", Bound(1))


# The commit before one scheduler planned every step.
BEFORE_SCHEDULER = "8f682c3"
SERVEGEN = ROOT.parent / "shared" / "data" / "servegen_r1.csv"
# Every shipped dispatch policy, a component, and a policy in each other slot.
REPLAYED = (
    *("fcfs", "output-first", "priority", "pascal", "srpt", "fair-share", "edf", "qoe"),
    str(ROOT / "target" / "policies" / "output-first.wasm"),
    "dispatch=output-first,eviction=prefix-value",
    "dispatch=output-first,budget=eat-rpdi",
)


def _replay(meridian: str, requests: int, rates: str, policies: tuple[str, ...]) -> tuple[str, float]:
    """What a build of `meridian` prints for a replay, and the processor time it took, seconds."""
    command = [
        meridian,
        "bench",
        "replay",
        "--json",
        "--trace",
        str(SERVEGEN),
        "--requests",
        str(requests),
    ]
    command += [
        "--rate",
        rates,
        *(x for policy in policies for x in ("--policy", policy)),
    ]
    before = os.times()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    after = os.times()
    return done.stdout, after.children_user - before.children_user


def _built_before() -> str:
    """The program of the commit before: `$MERIDIAN_BEFORE`, or built in a folder of its own, which takes minutes."""
    if given := os.environ.get("MERIDIAN_BEFORE"):
        return given
    folder = ROOT / "target" / "before"
    if not folder.exists():
        subprocess.run(
            ["git", "worktree", "add", "-q", "--detach", folder, BEFORE_SCHEDULER],
            cwd=ROOT,
            check=True,
        )
    say("  cargo build of the commit before")
    env = dict(os.environ, CARGO_TARGET_DIR=str(folder / "target"))
    subprocess.run(
        ["cargo", "build", "--release", "--locked", "-q", "-p", "meridian-cli"],
        cwd=folder,
        env=env,
        check=True,
    )
    return str(folder / "target" / "release" / "meridian")


def same(pairs: int) -> Iterator[Figure]:
    """Schedules before and after one scheduler planned every step, and what the simulator's steps cost."""
    before, now = _built_before(), str(ROOT / "target" / "release" / "meridian")
    differing = 0
    for policy in REPLAYED:
        one, other = (_replay(build, 1500, "2.1,2.6", (policy,))[0] for build in (before, now))
        differing += one != other
    yield Figure("same: policies replayed by both builds", len(REPLAYED), "policies")
    yield Figure(
        "same: policies whose schedules differ from the commit before",
        differing,
        "policies",
        Bound(0),
    )
    ratios = []
    for pair in range(4 * pairs):
        builds = (before, now) if pair % 2 == 0 else (now, before)
        took = {build: _replay(build, 2000, "2.6", ("output-first",))[1] for build in builds}
        ratios.append(took[now] / took[before])
    yield over_pairs(
        "same: processor time of a replay over that of the commit before",
        ratios,
        "ratio",
        Bound(1.03),
    )


def plans() -> Iterator[Figure]:
    """Files that put a plan's order into effect: one for engines in Rust, one for vLLM's lists in Python."""

    def carriers(commit: str) -> int:
        command = ["git", "grep", "-lE", r"fn reorder\(|let ordered = ", commit, "--", "*.rs"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        return len(done.stdout.splitlines())

    yield Figure("files that put a plan's order into effect before", carriers(BEFORE_SCHEDULER), "files")
    yield Figure("files that put a plan's order into effect", carriers("HEAD"), "files", Bound(2))


# What exists in product code once or several times: its name, where to look, and what betrays a file that has it.
COPIES = (
    ("copies of EAT's recurrence", r"alpha \* .*\(1(\.0f?)? - alpha\)", ("*.rs", "*.py", "*.cu")),
    ("tables of metrics", r"^METRICS|const METRICS", ("*.rs", "*.py")),
    ("readers of the project's own traces", r"def read_trace\(|^fn request\(row: &Row", ("*.rs", "*.py")),
    (
        "trackers of a request's phase beside the sampler's",
        r"PhaseTracker::new\(|Enforcer::new\(",
        ("host/*/src/*.rs",),
    ),
)
# Where one of them belongs: the sampler's, in a process of its own (ADR 0011), and what a tracker is made by.
BELONGS = ("host/engine/src/sampler.rs", "host/core/src/budget/enforce.rs", "host/core/src/phase.rs")


def copies() -> Iterator[Figure]:
    """Things that were written several times, in product code at the commit before the crate and now."""

    def files(commit: str, pattern: str, paths: tuple[str, ...]) -> int:
        command = ["git", "grep", "-lE", pattern, commit, "--", *paths]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
        names = [name.partition(":")[2] for name in found]
        elsewhere = ("tests/", "examples/", "bench/areas/")
        return sum(not any(x in name for x in elsewhere) and name not in BELONGS for name in names)

    for name, pattern, paths in COPIES:
        before, now = (files(commit, pattern, paths) for commit in (BEFORE, "HEAD"))
        yield Figure(f"{name} before", before, "files")
        yield Figure(name, now, "files", Bound(before, below=True))


def tokens() -> Iterator[Figure]:
    """What taking in a token costs, with the thinking followed, over the commit before the record was a row's. The
    programs are two builds of one example: `$MERIDIAN_TOKENS_BEFORE` is the earlier; without it nothing is compared."""
    now = ROOT / "target" / "release" / "examples" / "budget_figures"
    before = os.environ.get("MERIDIAN_TOKENS_BEFORE")
    if before is None:
        say("  MERIDIAN_TOKENS_BEFORE names no program: left out")
        return
    title = "fixed-budget: a step with line ends"

    def step_us(program: str) -> float:
        done = subprocess.run([program], capture_output=True, text=True, check=True)
        return next(x["value"] for x in map(json.loads, done.stdout.splitlines()) if x["name"] == title)

    ratios = []
    for turn in range(6):
        order = (before, str(now)) if turn % 2 == 0 else (str(now), before)
        took = {program: step_us(program) for program in order}
        ratios.append(took[str(now)] / took[before])
    yield over_pairs(
        "per-token cost over that of the commit before, 256 requests that think", ratios, "ratio", Bound(1.03)
    )


PLUGIN, SLOTS = "python/meridian/vllm/scheduler.py", "host/runtime/src/slot"
# From `schedule()` to the component: the type, the file, where the function begins, and what it calls next.
FIRST_CALLS = (
    ("scheduler", PLUGIN, r"def schedule\(", r"self\._begin_step\("),
    ("scheduler", PLUGIN, r"def _begin_step\(", r"self\._plan\("),
    ("scheduler", PLUGIN, r"def _plan\(", r"engine\.plan\("),
)
LAST_CALLS = (
    ("slot", f"{SLOTS}/mod.rs", r"fn decide_by\(", r"state\.decide\("),
    ("slot's state", f"{SLOTS}/mod.rs", r"fn decide\(&mut self, facts: &K::Facts", r"\.ask\("),
    ("guarded policy", "host/core/src/(guarded|seat).rs", r"pub fn ask\(", r"\.decide\("),
    ("component", "host/wasm/src/instance.rs", r"fn decide\(&mut self, batch", r"self\.decide_within\("),
    ("component", "host/wasm/src/instance.rs", r"fn decide_within\(", r"self\.call\("),
    ("guest", "host/wasm/src/guest.rs", r"fn decide\(", r"guest\.call_decide\("),
)
BINDING = "python/src/engine.rs"
CALLS_BEFORE = (
    ("engine", BINDING, r"fn plan<'py>\(", r"inner\.engine\.plan\("),
    ("DispatchEngine", "host/runtime/src/engine.rs", r"pub fn plan\(", r"self\.slot\.decide\("),
    ("slot", f"{SLOTS}/dispatch.rs", r"pub fn decide\(", r"self\.decide_by\("),
)
CALLS_NOW = (
    ("engine", BINDING, r"fn plan<'py>\(", r"driver\.plan\("),
    ("Driver", "host/engine/src/driver.rs", r"pub fn plan\(", r"self\.scheduler\.plan\("),
    ("MeridianScheduler", "host/core/src/scheduler/mod.rs", r"pub fn plan\(", r"decider\.decide\("),
    ("slot", f"{SLOTS}/dispatch.rs", r"fn decide\(&mut self, step", r"self\.decide_by\("),
)


def path() -> Iterator[Figure]:
    """Types and calls between `schedule()` and the component, each looked up in the sources."""

    def walked(commit: str, calls: tuple[tuple[str, str, str, str], ...]) -> tuple[int, int]:
        paths = subprocess.run(
            ["git", "ls-tree", "-r", "--name-only", commit], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for kind, file, begins, next_call in calls:
            (name,) = (path for path in paths if re.fullmatch(file, path))
            text = subprocess.run(
                ["git", "show", f"{commit}:{name}"], cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout
            if not re.search(f"{begins}.*?{next_call}", text, re.DOTALL):
                raise SystemExit(f"{name} at {commit}: no {kind} that has {begins} and calls {next_call}")
        return len({kind for kind, *_ in calls}), len(calls)

    before = walked(BEFORE, (*FIRST_CALLS, *CALLS_BEFORE, *LAST_CALLS))
    now = walked("HEAD", (*FIRST_CALLS, *CALLS_NOW, *LAST_CALLS))
    for what, was, count in zip(("types", "calls"), before, now, strict=True):
        yield Figure(f"{what} from schedule() to the component before", was, what)
        yield Figure(f"{what} from schedule() to the component", count, what, Bound(was, below=True))


def parts(pairs: int) -> dict[str, Callable[[], Iterator[Figure]]]:
    """Parts of the area by name."""
    return {
        "size": size,
        "plans": plans,
        "path": path,
        "copies": copies,
        "tokens": tokens,
        "same": lambda: same(pairs),
    }
