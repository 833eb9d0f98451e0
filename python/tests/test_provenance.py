"""`scripts/provenance.py`: what it signs verifies, and nothing else does."""

import base64
import json
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def python() -> str:
    """The Python with the libraries of a release."""
    command = (str(ROOT / "scripts" / "fetch.sh"), "release")
    tools = subprocess.run(command, check=True, capture_output=True, text=True)
    return f"{tools.stdout.strip()}/bin/python"


def provenance(python: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    command = (python, str(ROOT / "scripts" / "provenance.py"), *map(str, args))
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def signed(python: str, tmp_path: Path) -> Path:
    """A release folder with its statement, and the key beside it."""
    folder = tmp_path / "dist"
    folder.mkdir()
    (folder / "meridian-1.whl").write_bytes(b"a wheel")
    (folder / "SHA256SUMS").write_text("sums")
    assert provenance(python, "new-key", tmp_path / "key").returncode == 0
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    done = provenance(python, "sign", folder, tmp_path / "key")
    assert done.returncode == 0, done.stderr
    return folder


def test_a_signed_folder_verifies(python: str, signed: Path) -> None:
    done = provenance(python, "verify", signed, signed.parent / "key.pub")
    assert (done.returncode, done.stdout) == (0, "2 files are as signed\n")
    envelope = json.loads((signed / "provenance.intoto.jsonl").read_text())
    said = json.loads(base64.b64decode(envelope["payload"]))
    assert said["_type"] == "https://in-toto.io/Statement/v1"
    assert said["predicateType"] == "https://slsa.dev/provenance/v1"
    assert [subject["name"] for subject in said["subject"]] == ["SHA256SUMS", "meridian-1.whl"]
    head = subprocess.run(("git", "rev-parse", "HEAD"), cwd=ROOT, check=True, capture_output=True, text=True)
    dependencies = said["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert dependencies[0]["digest"]["gitCommit"] == head.stdout.strip()


@pytest.mark.parametrize("change", ["altered", "added", "removed", "statement", "other key"])
def test_whatever_changed_does_not_verify(python: str, signed: Path, change: str) -> None:
    public = signed.parent / "key.pub"
    if change == "altered":
        (signed / "meridian-1.whl").write_bytes(b"another wheel")
    elif change == "added":
        (signed / "more").write_bytes(b"")
    elif change == "removed":
        (signed / "SHA256SUMS").unlink()
    elif change == "statement":
        path = signed / "provenance.intoto.jsonl"
        envelope = json.loads(path.read_text())
        payload = base64.b64decode(envelope["payload"]).replace(b"meridian-1", b"meridian-2")
        path.write_text(json.dumps(envelope | {"payload": base64.b64encode(payload).decode()}))
    else:
        assert provenance(python, "new-key", signed.parent / "other").returncode == 0
        public = signed.parent / "other.pub"
    done = provenance(python, "verify", signed, public)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_bad_input_is_one_line(python: str, signed: Path) -> None:
    key = signed.parent / "key"
    for args in (
        ("verify", signed, signed.parent / "absent.pub"),
        ("verify", signed, key),
        ("verify", signed / "absent", signed.parent / "key.pub"),
        ("sign", signed / "SHA256SUMS", key),
        ("sign", signed, signed / "SHA256SUMS"),
        ("new-key", key),
        ("what",),
    ):
        done = provenance(python, *args)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), (args, done.stderr)
