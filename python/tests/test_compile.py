"""Components are compiled in another Python, which loads nothing but the extension module."""

import json
import os
import subprocess
import sys
from pathlib import Path

import meridian
import pytest
from meridian import _native

SCRIPT = Path(meridian.__file__).with_name("_compile.py")


def compiled(component: bytes, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    """Compile as the host does: no environment, no site-packages."""
    request = {"parent": os.getpid(), "cpu_s": 60, "memory_bytes": 1 << 31}
    command = (sys.executable, "-I", "-S", str(SCRIPT), str(_native.__file__))
    given = json.dumps(request).encode() + b"\n" + component
    return subprocess.run(command, input=given, capture_output=True, env={}, cwd=cwd, timeout=120)


def test_a_component_is_compiled(policies: Path, tmp_path: Path) -> None:
    done = compiled((policies / "balanced.wasm").read_bytes(), tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    line, artifact = done.stdout.split(b"\n", 1)
    assert json.loads(line)["compiled"]["bytes"] == len(artifact)
    assert done.stderr == b""


def test_a_refusal_is_one_line(tmp_path: Path) -> None:
    done = compiled(b"\0asm\x0d\0\x01\0\xff", tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.count(b"\n") == 1
    assert json.loads(done.stdout)["invalid"]["detail"]


ENGINE = """
import sys
if len(sys.argv) > 2:
    sys.executable = sys.argv[2]
from meridian import MeridianConfig, PolicyConfig, PolicyEngine, SlotConfig
PolicyEngine(MeridianConfig(policy=PolicyConfig(dispatch=SlotConfig(source=sys.argv[1]))))
"""


COMMAND = """
import sys
from meridian._native import run_command
if len(sys.argv) > 2:
    sys.executable = sys.argv[2]
sys.exit(run_command(["meridian", "policy", "check", sys.argv[1]]))
"""


@pytest.mark.parametrize("program", [ENGINE, COMMAND], ids=["engine", "command"])
@pytest.mark.parametrize("interpreter", [None, "/nowhere/python", ""])
def test_an_engine_and_the_command_start_the_interpreter(
    program: str, interpreter: str | None, policies: Path, tmp_path: Path
) -> None:
    args = [str(policies / "balanced.wasm"), *([] if interpreter is None else [interpreter])]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = (sys.executable, "-c", program, *args)
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    if interpreter == "/nowhere/python":
        assert "cannot start /nowhere/python to compile" in done.stderr
    else:
        # An interpreter without a path compiles on a thread.
        assert done.returncode == 0, done.stderr
