#!/usr/bin/env python3
"""Sign and verify the provenance of a release folder.

usage: provenance.py new-key FILE           writes an ed25519 key to FILE and its public half to FILE.pub
       provenance.py sign FOLDER KEY        writes FOLDER/provenance.intoto.jsonl; KEY is a file or PEM text
       provenance.py verify FOLDER PUBLIC   checks the signature and every file of the folder

The statement is in-toto Statement v1 with the predicate SLSA Provenance v1, in a DSSE envelope. It names every file of
the folder by its SHA-256, the commit, the lock files and the compiler. Exit codes: 0 good, 1 verification failed, 2 bad
input.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import CryptoSigner, SSlibKey

STATEMENT = "provenance.intoto.jsonl"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("Cargo.lock", "policies/Cargo.lock", "python/uv.lock", "scripts/tools.lock.txt", "scripts/release.lock.txt")


class BadInput(Exception):
    """One line: where, the value, what was expected."""


def sha256(path: Path) -> str:
    """Digest of a file, hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def output(*command: str) -> str:
    """What a command prints."""
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def files(folder: Path) -> list[Path]:
    """All files of a release but the statement itself."""
    if not folder.is_dir():
        raise BadInput(f"{folder}: expected the folder of a release")
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name != STATEMENT)


def statement(folder: Path) -> dict[str, Any]:
    """An in-toto statement about every file of a folder."""
    now = datetime.now(timezone.utc).replace(microsecond=0).isoformat()
    github = os.environ.get("GITHUB_SERVER_URL")
    repository = f"{github}/{os.environ['GITHUB_REPOSITORY']}" if github else "local"
    commit = output("git", "rev-parse", "HEAD")
    locks = [{"uri": f"file:{name}", "digest": {"sha256": sha256(ROOT / name)}} for name in LOCKS]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": path.name, "digest": {"sha256": sha256(path)}} for path in files(folder)],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:meridian:release-script:v1",
                "externalParameters": {"command": "make release"},
                "internalParameters": {"rustc": output("rustc", "--version"), "python": sys.version.split()[0]},
                "resolvedDependencies": [
                    {"uri": f"git+{repository}", "digest": {"gitCommit": commit}},
                    *locks,
                ],
            },
            "runDetails": {
                "builder": {"id": f"{repository}/actions" if github else "urn:meridian:builder:local"},
                "metadata": {"invocationId": os.environ.get("GITHUB_RUN_ID", commit), "finishedOn": now},
            },
        },
    }


def signer_of(key: str) -> CryptoSigner:
    """The signer of a key: PEM text, or the path of a file with it."""
    pem = key.encode() if "BEGIN" in key else _read(Path(key))
    try:
        return CryptoSigner(load_pem_private_key(pem, password=None))
    except ValueError as error:
        raise BadInput("signing key: expected an ed25519 private key in PEM (PKCS #8), without a password") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error


def new_key(path: Path) -> None:
    """Write a key that only its owner may read, and its public half beside it. Overwrites nothing."""
    signer = CryptoSigner.generate_ed25519()
    public = signer._private_key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(signer.private_bytes)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error
    path.with_name(path.name + ".pub").write_bytes(public)


def sign(folder: Path, key: str) -> None:
    """Write the signed statement of a folder."""
    payload = json.dumps(statement(folder), sort_keys=True).encode()
    envelope = Envelope(payload, PAYLOAD_TYPE, {})
    envelope.sign(signer_of(key))
    (folder / STATEMENT).write_text(json.dumps(envelope.to_dict()) + "\n")


def verify(folder: Path, public: Path) -> int:
    """Hold a folder against its statement; returns the number of files.

    Raises:
        VerificationError: the signature, or a file, is not the one of the statement.
    """
    try:
        key = SSlibKey.from_crypto(load_pem_public_key(_read(public)))
        envelope = Envelope.from_dict(json.loads(_read(folder / STATEMENT)))
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{folder / STATEMENT} or {public}: {error}") from error
    envelope.verify([key], 1)
    said = json.loads(envelope.payload)
    named = {subject["name"]: subject["digest"]["sha256"] for subject in said["subject"]}
    found = {path.name: sha256(path) for path in files(folder)}
    for name in sorted(named.keys() | found.keys()):
        if named.get(name) != found.get(name):
            raise VerificationError(
                f"{name}: {found.get(name, 'missing')}, the statement has {named.get(name, 'nothing')}"
            )
    return len(named)


def main() -> int:
    """Run one of the three commands."""
    try:
        match sys.argv[1:]:
            case ["new-key", path]:
                new_key(Path(path))
            case ["sign", folder, key]:
                sign(Path(folder), key)
            case ["verify", folder, public]:
                print(f"{verify(Path(folder), Path(public))} files are as signed")
            case ["-h" | "--help"]:
                print(__doc__)
            case _:
                raise BadInput(f"arguments: {sys.argv[1:]}: expected new-key, sign or verify; see --help")
    except VerificationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
