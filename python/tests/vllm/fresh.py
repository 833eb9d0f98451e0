"""Scripts that make an engine, each in a process of its own.

The process is forked from one that has imported vLLM: the import takes six seconds, as long as many of the scripts.

    fresh.run("checks.engine", "forced_ends")  # what python -m does
    fresh.run(None, "a", code="print(1)")      # what python -c does

It is not for scripts that test an import.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[3]


@cache
def _server() -> subprocess.Popen[str]:
    """It ends with this process, which holds the other end of its input."""
    command = (sys.executable, __file__)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def run(
    module: str | None, *arguments: str, code: str = "", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a module, or `code`, in the folder of the repository; with `PYTHONPATH` of `env`, if it has one."""
    # The process that forks knows no `checks`.
    from checks import started

    started.count()
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        asked = {
            "module": module,
            "code": code,
            "arguments": arguments,
            "env": dict(env or os.environ),
            "out": str(out),
            "err": str(err),
        }
        print(json.dumps(asked), file=server.stdin, flush=True)
        ended = server.stdout.readline()
        assert ended, f"the process that forks has ended: {server.poll()}"
        return subprocess.CompletedProcess(arguments, int(ended), out.read_text(), err.read_text())


def _child(asked: dict[str, Any]) -> NoReturn:
    """Become what a new Python with this module would be."""
    status = 1
    try:
        for path, number in ((os.devnull, 0), (asked["out"], 1), (asked["err"], 2)):
            opened = os.open(path, os.O_RDWR | os.O_CREAT)
            os.dup2(opened, number)
            os.close(opened)
        os.environ.clear()
        os.environ.update(asked["env"])
        sys.path[:0] = [str(ROOT), *filter(None, asked["env"].get("PYTHONPATH", "").split(os.pathsep))]
        sys.argv = [asked["module"] or "-c", *asked["arguments"]]
        if asked["module"]:
            runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
        else:
            exec(compile(asked["code"], "<string>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if ended.code is not None and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def measure(name: str, **options: Any) -> dict[str, Any]:
    """What a module measures: one of `checks.engine`, or one with a dotted name."""
    done = run("checks.engine", name, *(f"{key}={json.dumps(value, default=str)}" for key, value in options.items()))
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def skip_without_cpu_runner_v2() -> None:
    """Of the versions with a build for CPUs, Model Runner V2 was tried on vLLM 0.32."""
    import pytest
    import vllm

    if not vllm.__version__.startswith("0.32"):
        pytest.skip("tried on vLLM 0.32 only")


def main() -> None:
    """Import, then fork for each line of the input."""
    from meridian.vllm.bench.run import ENVIRONMENT

    sys.path.remove(str(Path(__file__).parent))
    os.environ.update(ENVIRONMENT)
    for name in ("meridian.vllm.processor", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker"):
        import_module(name)

    for line in sys.stdin:
        if not (child := os.fork()):
            _child(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
