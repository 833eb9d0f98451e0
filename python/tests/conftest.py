"""Shared by the tests. Those under `vllm/` run the real vLLM engine on CPU; the rest need only the wheel."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The files that take minutes. They are begun first, so that two processes end at about the same time.
LONGEST = ("test_outputs.py", "test_languages.py", "test_budget_engine.py", "test_budget_probes.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--seams plug-ins`: run the tests of this process on a vLLM with scheduler plug-ins (vllm/plugin_stand_in.py)."""
    parser.addoption("--seams", choices=("lists", "plug-ins"), default="lists")
    parser.addoption("--canary", action="store_true", help="count the installed vLLM as the newest supported one")


def pytest_configure(config: pytest.Config) -> None:
    """A run folder that no other engine uses and, if there are several processes of pytest-xdist, cores of its own."""
    if config.getoption("canary"):
        import vllm
        from meridian.vllm import compat

        vllm.__version__ = ".".join(map(str, compat.SUPPORTED[1]))
    # A short path, for its sockets.
    folder = tempfile.mkdtemp(prefix="m", dir="/tmp")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["XDG_RUNTIME_DIR"] = folder
    # What vLLM and torch keep: a run finds nothing of another, as on a new machine.
    os.environ["VLLM_CACHE_ROOT"], os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/vllm", f"{folder}/inductor"
    if not os.environ.get("PYTEST_XDIST_WORKER"):
        os.environ["MERIDIAN_TEST_ENGINES"] = f"{folder}/engines"
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        cores, count = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        # One that replaces a process that crashed has a higher number.
        own = cores[int(worker.removeprefix("gw")) % count :: count]
        os.sched_setaffinity(0, own or cores)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What the table of stages shows if the run is ended from outside (scripts/stage.py)."""
    if stage := os.environ.get("MERIDIAN_STAGE_NOW"):
        Path(f"{stage}-{os.environ.get('PYTEST_XDIST_WORKER', 'test')}").write_text(item.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many engines were started, after the slowest tests."""
    file = Path(os.environ["MERIDIAN_TEST_ENGINES"])
    terminalreporter.write_line(f"{file.stat().st_size if file.exists() else 0} engines of vLLM were started")


def built(path: str, target: str) -> Path:
    """A build result the tests need; says which make target makes it."""
    found = ROOT / path
    if not found.exists():
        pytest.fail(f"{path} is missing: run `make {target}` first")
    return found


@pytest.fixture(scope="session")
def policies() -> Path:
    """Folder of the shipped components."""
    return built("target/policies", "policies")


@pytest.fixture(scope="session")
def hostile() -> Path:
    """Folder of the hostile components; `kinds.txt` names the fault that each causes."""
    return built("target/hostile", "test")


@pytest.fixture(scope="session")
def tokenizers() -> Path:
    """Folder of real tokenizers: FAMILY/tokenizer.json."""
    folder = os.environ.get("MERIDIAN_TOKENIZERS")
    if not folder:
        pytest.fail(
            "MERIDIAN_TOKENIZERS is not set: run `make test`, or set it to the output of scripts/fetch.sh tokenizers"
        )
    return Path(folder)
