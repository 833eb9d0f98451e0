"""The manifests of `examples/kubernetes`: valid for Kubernetes, and consistent with Meridian and with each other."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from meridian import MeridianConfig

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
MANIFESTS = ("configmap.yaml", "oci.yaml")
# Versions of Kubernetes whose schemas the checker has.
VERSIONS = ("1.29", "1.37")
# Runs in the checker's environment: validates each document, then prints all of them as JSON.
CHECK = """
import json, sys, kubernetes_validate, yaml
version, path = sys.argv[1:]
documents = list(yaml.safe_load_all(open(path)))
for document in documents:
    kubernetes_validate.validate(document, version, strict=True)
print(json.dumps(documents))
"""


@pytest.fixture(scope="session")
def checker() -> Path:
    """A Python with the schemas of Kubernetes, which come as a package."""
    made = subprocess.run(
        [str(ROOT / "scripts" / "fetch.sh"), "kubernetes"], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    return Path(made.stdout.strip()) / "bin" / "python"


def checked(checker: Path, path: Path, version: str = VERSIONS[-1]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(checker), "-c", CHECK, version, str(path)], capture_output=True, text=True)


def documents(checker: Path, name: str) -> dict[str, Any]:
    """The documents of a manifest by kind."""
    done = checked(checker, FOLDER / name)
    assert done.returncode == 0, done.stderr
    return {document["kind"]: document for document in json.loads(done.stdout)}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_are_valid(checker: Path, name: str, version: str) -> None:
    done = checked(checker, FOLDER / name, version)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("replica: 2", "replicas: 2"),
        ("replicas: two", "replicas: 2"),
        ("image: 3", "image: registry.example.com/vllm-meridian:0.32.0"),
        ("mountPaths: /run", "mountPath: /run"),
    ],
)
def test_the_check_finds_mistakes(checker: Path, tmp_path: Path, wrong: str, right: str) -> None:
    text = (FOLDER / MANIFESTS[0]).read_text()
    assert right in text
    (tmp_path / "wrong.yaml").write_text(text.replace(right, wrong))
    assert checked(checker, tmp_path / "wrong.yaml").returncode != 0


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_configuration_is_meridians(checker: Path, name: str, tmp_path: Path) -> None:
    from meridian import load_config

    (tmp_path / "meridian.toml").write_text(documents(checker, name)["ConfigMap"]["data"]["meridian.toml"])
    config: MeridianConfig = load_config(tmp_path / "meridian.toml")
    assert config.policy.watch
    assert config.admin.token_file == "/run/meridian/token"
    source = config.policy.dispatch.source
    assert source.startswith("oci://") == bool(config.policy.trusted_keys) == (name == "oci.yaml")


@pytest.mark.parametrize("name", MANIFESTS)
def test_what_the_pod_names_is_there(checker: Path, name: str) -> None:
    found = documents(checker, name)
    pod = found["Deployment"]["spec"]["template"]
    assert found["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    containers = [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]
    mounts = [mount for container in containers for mount in container["volumeMounts"]]
    assert {mount["name"] for mount in mounts} == volumes
    # Kubernetes does not update a file that is mounted alone.
    assert not any("subPath" in mount for mount in mounts)
    (serving,) = pod["spec"]["containers"]
    paths = [mount["mountPath"] for mount in serving["volumeMounts"]]
    toml = found["ConfigMap"]["data"]["meridian.toml"]
    environment = {each["name"]: each["value"] for each in serving["env"]}
    named = [line.split('"')[1] for line in toml.splitlines() if '= "/' in line]
    for path in (*named, environment["MERIDIAN_CONFIG"], environment["XDG_RUNTIME_DIR"], environment["HF_HOME"]):
        assert any(path.startswith(mounted) for mounted in paths), path
    assert environment["MERIDIAN_CONFIG"].endswith("/meridian.toml")
    # Without this, other users of the image could read the token; with a group it would be refused.
    assert "fsGroup" not in pod["spec"]["securityContext"]
    assert found["ConfigMap"]["metadata"]["name"] in str(pod["spec"]["volumes"])


def test_the_options_are_vllms(checker: Path) -> None:
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for name in MANIFESTS:
        (serving,) = documents(checker, name)["Deployment"]["spec"]["template"]["spec"]["containers"]
        args: Any = make_arg_parser(FlexibleArgumentParser()).parse_args(serving["args"])
        made = AsyncEngineArgs.from_cli_args(args)
        assert (made.data_parallel_size, args.api_server_count) == (2, 2)
        assert made.scheduler_cls == "meridian.vllm.MeridianScheduler"
