"""Checks and measures Meridian on a machine with a GPU, in one go: `make gpu`.

    make gpu                                        # everything, with random weights of a model of 1B parameters
    make gpu ARGS="--model DIR"                     # the model in this folder
    make gpu ARGS="--small"                         # in about ten minutes, and 64 MiB of files at most
    make gpu ARGS="--dry-run"                       # every stage without a GPU; its times say nothing
    python -m checks.gpu --only answers             # a stage, without vLLM: needs PyTorch and nvcc, and this checkout

The stages: `machine` (device, driver, versions), `answers` (the entropy kernels against float64), `sanitizer` (the
same under compute-sanitizer), `product` (as the logits processor launches them), `times` (against PyTorch,
torch.compile and a copy), `engine` (budgets end at their token, synchronous and asynchronous, and what is only loaded
changes nothing), `day` (stock vLLM and Meridian through a short day with a burst, in pairs).

With all stages, writes gpu.jsonl, a line a figure, and gpu.md, the page, into the folder of --out. A dry run takes the
same way on an emulated device, vLLM on the CPU and the small model. Exit code: 0 all bounds hold, 1 one does not or a
stage failed, 2 bad arguments, 3 there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from checks.gpu.answers import check, figure
from checks.gpu.driver import ROOT, Failed, Kernels
from checks.gpu.entropy import DRY, Sizes, sanitize, sweep, times
from checks.gpu.product import product

RESULTS = ROOT / "bench" / "results"
MERIDIAN = (sys.executable, "-m", "meridian", "--json")
NOT_MEASURED = 3
# The day: factors of what stock vLLM serves, and seconds; a burst of 1.6 in its middle.
DAY = "0.6x{0},1.6x{1},0.6x{2}"
# Qwen3's shape of 1B parameters, beside the small model's tokenizer.
SHAPE = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 16, "vocab_size": 151_936}
SHAPE |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
COMPARED = (
    ("TTFT p99", "ttft_p99_ms"),
    ("TTFO p50", "ttfo_p50_ms"),
    ("TTFO p99", "ttfo_p99_ms"),
    ("output ITL p99", "itl_output_p99_ms"),
    ("throughput", "throughput_tok_s"),
)


@dataclass(frozen=True)
class Plan:
    """How much is done."""

    sizes: Sizes
    small: bool
    # Requests of each run of the engine stage, and of the run that measures what stock vLLM serves.
    requests: int
    at_once: int
    # Seconds of the day before, in and after the burst.
    day_s: tuple[int, int, int]
    pairs: int
    # Of the model with random weights, beside those of the small model.
    shape: dict[str, int]


FULL = Plan(Sizes(), small=False, requests=1000, at_once=2000, day_s=(60, 60, 120), pairs=5, shape=SHAPE)
SMALL = Plan(
    Sizes(rows=(1, 256), replays=10), small=True, requests=200, at_once=400, day_s=(10, 10, 20), pairs=2, shape=SHAPE
)
DRY_RUN = Plan(DRY, small=True, requests=24, at_once=8, day_s=(1, 1, 2), pairs=2, shape={})


class Machine:
    """A GPU with PyTorch, or the emulated device."""

    def __init__(self, *, dry: bool) -> None:
        import torch

        self.torch, self.dry = torch, dry
        self.device = "cpu" if dry else "cuda"
        self._kernels: Kernels | None = None

    @property
    def kernels(self) -> Kernels:
        """The kernels, built when they are first asked for."""
        if self._kernels is None:
            self._kernels = Kernels.emulated(self.torch) if self.dry else Kernels.on_gpu(self.torch)
        return self._kernels

    def facts(self) -> dict[str, Any]:
        """Device, versions, commit."""
        commit = output("git", "rev-parse", "--short=12", "HEAD")
        today = time.strftime("%Y-%m-%d", time.gmtime())
        found = {"torch": self.torch.__version__, "commit": commit, "measured": today}
        if self.dry:
            return {"machine": "no GPU: emulated", **found}
        properties = self.torch.cuda.get_device_properties(self.torch.cuda.current_device())
        name = f"{properties.name}, {properties.multi_processor_count} multiprocessors"
        return {"machine": name, "memory_gib": round(properties.total_memory / 2**30, 1), **found}


def output(*command: str | Path) -> str:
    """What a program prints.

    Raises:
        Failed: with the end of what it said.
    """
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{command[0]}: exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout.strip()


def machine(here: Machine, _: Plan, __: argparse.Namespace) -> list[dict[str, Any]]:
    """The device and its driver."""
    import ctypes

    version = ctypes.c_int()
    here.kernels.driver.call("cuDriverGetVersion", ctypes.byref(version))
    found = [figure("driver: CUDA version", version.value / 1000, "")]
    if not here.dry:
        free, total = here.torch.cuda.mem_get_info()
        found.append(figure("memory of the device", total / 2**30, "GiB"))
        found.append(figure("of it free", free / 2**30, "GiB"))
    return found


def engine(here: Machine, plan: Plan, _: argparse.Namespace) -> list[dict[str, Any]]:
    """The real engine: forced endings, and outputs with both classes only loaded."""
    needs_device(here)
    found = []
    for scheduling in ("sync", "async"):
        run = measured("forced_ends", requests=plan.requests, scheduling=scheduling)
        name = f"engine, {scheduling}: requests that end at their token"
        found.append(figure(name, run["exact"], f"of {run['requests']}", f">= {run['requests']}"))
    run = measured("forced_ends", requests=plan.requests, scheduling="async", loaded_only=True)
    name = "engine: requests as in stock vLLM, nothing set"
    found.append(figure(name, run["exact"], f"of {run['requests']}", f">= {run['requests']}"))
    return found


def needs_device(here: Machine) -> None:
    """Refuse a vLLM for CPUs on a machine with a GPU.

    Raises:
        Failed: says what is needed.
    """
    program = "from vllm.platforms import current_platform; print(current_platform.device_type)"
    if not here.dry and output(sys.executable, "-c", program).splitlines()[-1] != "cuda":
        raise Failed("vLLM is a build for CPUs: set MERIDIAN_PYTHON to a Python with vLLM for CUDA")


def measured(name: str, **options: Any) -> dict[str, Any]:
    """What `checks.engine.NAME` finds, in a process of its own."""
    given = [f"{key}={json.dumps(value)}" for key, value in options.items()]
    return json.loads(output(sys.executable, "-m", "checks.engine", name, *given).splitlines()[-1])


def random_model(out: Path, shape: dict[str, int]) -> Path:
    """A folder without weights, for which vLLM makes random ones."""
    from meridian.vllm.bench.model import model_dir

    out.mkdir(parents=True, exist_ok=True)
    for path in model_dir().iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, out)
    config = json.loads((out / "config.json").read_text()) | shape
    config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    (out / "config.json").write_text(json.dumps(config, indent=1))
    return out


def day(here: Machine, plan: Plan, a: argparse.Namespace) -> list[dict[str, Any]]:
    """Stock vLLM beside Meridian: what it serves, then pairs of a day at 0.6 of that with a burst of 1.6."""
    needs_device(here)
    work = ROOT / "target" / "gpu-day"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    model = ("--model", a.model or random_model(work / "model", plan.shape))
    workload = ROOT / "checks" / "engine" / "fidelity.toml"

    def generate(out: Path, seed: int, rate: float, *length: str) -> None:
        text = workload.read_text().replace("requests_per_s = 6.0", f"requests_per_s = {rate}")
        (work / "workload.toml").write_text(f"{text}\n[arrivals]\ngap_cv = 1.0\n")
        command = (*MERIDIAN, "bench", "generate", "--workload", work / "workload.toml", "--seed", str(seed))
        output(*command, *length, "--out", out)

    def compared(label: str, trace: Path, *more: str) -> list[dict[str, Any]]:
        command = (*MERIDIAN, "bench", "vllm", "--out", work / label, "--trace", trace)
        said = output(*command, "--max-num-seqs", "256", *model, *more)
        return json.loads(said)["comparisons"][0]["runs"]

    generate(work / "once.csv", 1, 6.0, "--requests", str(plan.at_once))
    compared("once", work / "once.csv", "--at-once", "--without-stock", "--policy", "stock")
    (recorded,) = (path for path in (work / "once").glob("*-stock.json") if not path.name.endswith(".job.json"))
    rate = round(plan.at_once / json.loads(recorded.read_text())["makespan_s"], 2)
    found = [figure("day: requests that stock vLLM serves", rate, "requests/s")]
    ratios: dict[str, list[float]] = {name: [] for name, _ in COMPARED}
    for pair in range(plan.pairs):
        generate(work / f"day-{pair}.csv", pair + 2, rate, "--day", DAY.format(*plan.day_s))
        names = ["stock", "balanced"][:: -1 if pair % 2 else 1]
        policies = (word for name in names for word in ("--policy", name))
        runs = compared(f"day-{pair}", work / f"day-{pair}.csv", "--without-stock", *policies)
        by_name = {one["policy"]: one["metrics"] for one in runs}
        for name, key in COMPARED:
            ratios[name].append(by_name["balanced"][key] / by_name["stock"][key])
        print(f"  pair {pair + 1} of {plan.pairs}", file=sys.stderr, flush=True)
    for name, values in ratios.items():
        name = f"day: {name}, balanced over stock"
        found.append(figure(name, median(values), "ratio", low=min(values), high=max(values)))
    return found


Stage = Callable[[Machine, Plan, argparse.Namespace], list[dict[str, Any]]]
STAGES: dict[str, Stage] = {
    "machine": machine,
    "answers": lambda here, plan, a: check(here.kernels, a.seed, small=plan.small),
    "sanitizer": lambda here, plan, a: sanitize(a.seed, at_all=not plan.small),
    "product": lambda here, plan, a: product(here.torch, here.device, a.seed, plan.sizes),
    "times": lambda here, plan, a: times(here.kernels, plan.sizes),
    "engine": engine,
    "day": day,
}


def run(here: Machine, plan: Plan, a: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """Every stage, also after one that failed; its figures, with minutes of each, and how many failed."""
    found: list[dict[str, Any]] = []
    failed = 0
    for name in a.only or STAGES:
        print(f"==> {name}", file=sys.stderr, flush=True)
        begun = time.monotonic()
        try:
            lines = STAGES[name](here, plan, a)
            if here.dry and name == "times":
                # Nothing is promised of an emulated device.
                lines = [line | {"bound": None, "holds": None} for line in lines]
        except Exception as why:
            failed += 1
            lines = []
            print(f"error: {name}: {why}", file=sys.stderr)
            if not isinstance(why, Failed):
                traceback.print_exc()
        minutes = figure(f"minutes of the stage {name}", (time.monotonic() - begun) / 60, "minutes")
        found += [line | {"stage": name} for line in (*lines, minutes)]
    return found, failed


def write(out: Path, facts: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """The figures and the page."""
    out.mkdir(parents=True, exist_ok=True)
    command = "make gpu"
    lines = [json.dumps({"area": "gpu", **line, "command": command, **facts}) for line in found]
    (out / "gpu.jsonl").write_text("\n".join(lines) + "\n")
    page = [f"# Meridian on {facts['machine']}", ""]
    page += [f"torch {facts['torch']}, commit {facts['commit']}, {facts['measured']}. Written by `make gpu`.", ""]
    page += ["| stage | figure | value | unit | bound | |", "|---|---|---|---|---|---|"]
    for line in found:
        holds = {True: "holds", False: "**falls short**", None: ""}[line["holds"]]
        cells = (line["stage"], line["name"], f"{line['value']:.5g}", line["unit"], line["bound"] or "", holds)
        page.append(f"| {' | '.join(cells)} |")
    (out / "gpu.md").write_text("\n".join(page) + "\n")


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(
        prog="python -m checks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--only", choices=tuple(STAGES), action="append", help="a stage; may be given again (default: all)")
    p.add_argument("--model", type=Path, help="folder of a model (default: random weights of 1B parameters)")
    p.add_argument("--small", action="store_true", help="take about ten minutes, and write 64 MiB at most")
    p.add_argument("--dry-run", action="store_true", help="run every stage on the emulated device and the CPU")
    p.add_argument("--sweep", action="store_true", help="time other ways to compile and to split too")
    p.add_argument("--seed", type=int, default=time.time_ns() % (1 << 31), help="of the inputs (default: the clock)")
    p.add_argument("--out", type=Path, help="folder for gpu.jsonl and gpu.md (default: bench/results)")
    p.add_argument("--json", action="store_true", help="print one JSON object: device, versions, figures")
    a = p.parse_args()
    if a.model is not None and not (a.model / "config.json").is_file():
        p.error(f"--model: {a.model}: expected a folder with a config.json")
    try:
        import torch
    except ImportError:
        print("not measured: PyTorch is not installed", file=sys.stderr)
        return NOT_MEASURED
    if not a.dry_run and not torch.cuda.is_available():
        print("not measured: PyTorch sees no CUDA device; --dry-run needs none", file=sys.stderr)
        return NOT_MEASURED
    plan = DRY_RUN if a.dry_run else SMALL if a.small else FULL
    a.out = a.out or (ROOT / "target" / "gpu-dry-run" if a.dry_run else RESULTS)
    here = Machine(dry=a.dry_run)
    facts = here.facts() | {"seed": a.seed}
    found, failed = run(here, plan, a)
    swept = {"sweep": sweep(torch, plan.sizes)} if a.sweep and not a.dry_run else {}
    if not a.only:
        write(a.out, facts, found)
    if a.json:
        print(json.dumps(facts | swept | {"failed": failed, "figures": found}))
    else:
        for line in swept.get("sweep", [])[:8]:
            print(f"  {line}")
        for line in found:
            holds = {True: "holds", False: "FALLS SHORT", None: ""}[line["holds"]]
            print(f"{line['name']:66} {line['value']:12.5g} {line['unit']:10} {line['bound'] or '':9} {holds}")
    return 1 if failed or any(line["holds"] is False for line in found) else 0


if __name__ == "__main__":
    sys.exit(main())
