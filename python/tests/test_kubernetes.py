"""What `deploy` has for clusters: valid for Kubernetes, and consistent with Meridian and with itself."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from meridian import load_config

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
FOLDER = DEPLOY / "kubernetes"
BASE, POLICY_CONFIGMAP, POLICY_OCI, GROUPS = FOLDERS = ("base", "policy-configmap", "policy-oci", "leader-worker-set")
# Versions of Kubernetes whose schemas the checker has.
VERSIONS = ("1.29", "1.37")
# Kinds of other projects, whose schemas it has not.
FOREIGN = ("PodMonitor", "LeaderWorkerSet")
# Both run in the checker's environment, which has a YAML parser and the schemas.
PARSE = "import json, sys, yaml; print(json.dumps([d for p in sys.argv[1:] for d in yaml.safe_load_all(open(p))]))"
VALIDATE = """
import json, sys, kubernetes_validate
for document in json.load(sys.stdin):
    kubernetes_validate.validate(document, sys.argv[1], strict=True)
"""
Document = dict[str, Any]


@pytest.fixture(scope="session")
def checker() -> Path:
    """A Python with the schemas of Kubernetes, which come as a package."""
    made = subprocess.run(
        [str(ROOT / "scripts" / "fetch.sh"), "kubernetes"], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    return Path(made.stdout.strip()) / "bin" / "python"


def parsed(checker: Path, *paths: Path) -> list[Document]:
    done = subprocess.run([str(checker), "-c", PARSE, *map(str, paths)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def problem(checker: Path, documents: list[Document], version: str = VERSIONS[-1]) -> str:
    """Why a schema refuses one of them; empty if none does. The pods of a foreign kind are validated too."""
    own = [document for document in documents if document["kind"] not in FOREIGN]
    for template in (template for document in documents for template in templates(document)):
        own.append({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template})
    command = [str(checker), "-c", VALIDATE, version]
    return subprocess.run(command, input=json.dumps(own), capture_output=True, text=True).stderr


def templates(document: Document) -> list[Document]:
    spec = document.get("spec", {})
    group = spec.get("leaderWorkerTemplate", {})
    found = spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")
    return [template for template in found if template]


def merged(old: Any, new: Any, key: str = "name") -> Any:
    """A strategic merge patch, as far as the overlays need it: lists whose items have a key are merged by it."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = {"volumeMounts": "mountPath"}
        return old | {field: merged(old.get(field), value, keys.get(field, "name")) for field, value in new.items()}
    if isinstance(old, list) and isinstance(new, list) and all(isinstance(item, dict) and key in item for item in new):
        items = {item[key]: item for item in old}
        return list((items | {item[key]: merged(items.get(item[key]), item) for item in new}).values())
    return new


def render(checker: Path, folder: Path) -> list[Document]:
    """The documents that `kubectl kustomize` prints."""
    (made,) = parsed(checker, folder / "kustomization.yaml")
    known = {"apiVersion", "kind", "resources", "configMapGenerator", "generatorOptions", "patches"}
    assert made.keys() <= known, made.keys() - known
    documents: list[Document] = []
    for resource in made["resources"]:
        path = folder / resource
        documents += render(checker, path) if path.is_dir() else parsed(checker, path)
    found = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    for each in made.get("configMapGenerator", ()):
        # Without it, a changed ConfigMap would have another name and restart the pods.
        assert made["generatorOptions"] == {"disableNameSuffixHash": True}
        data = {name: (folder / name).read_text() for name in each["files"]}
        found["ConfigMap", each["name"]] = {
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": each["name"]}, "data": data,
        }  # fmt: skip
    for patch in parsed(checker, *(folder / patch["path"] for patch in made.get("patches", ()))):
        name = patch["kind"], patch["metadata"]["name"]
        if patch.get("$patch") == "delete":
            del found[name]
        else:
            found[name] = merged(found[name], patch)
    return list(found.values())


@pytest.fixture(scope="session")
def rendered(checker: Path) -> dict[str, list[Document]]:
    return {name: render(checker, FOLDER / name) for name in FOLDERS}


def one(documents: list[Document], kind: str, name: str | None = None) -> Document:
    (found,) = (each for each in documents if each["kind"] == kind and name in (None, each["metadata"]["name"]))
    return found


def pods(documents: list[Document]) -> list[Document]:
    """The templates of the pods; the first serves."""
    return [template for document in documents for template in templates(document)]


def sorted_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: sorted_lists(item) for key, item in value.items()}
    if isinstance(value, list):
        return sorted(map(sorted_lists, value), key=lambda item: json.dumps(item, sort_keys=True))
    return value


@pytest.mark.skipif(not shutil.which("kubectl"), reason="compares with kubectl where it is installed")
@pytest.mark.parametrize("name", FOLDERS)
def test_kubectl_renders_the_same(checker: Path, rendered: dict[str, Any], name: str, tmp_path: Path) -> None:
    done = subprocess.run(["kubectl", "kustomize", str(FOLDER / name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (tmp_path / "rendered.yaml").write_text(done.stdout)
    assert sorted_lists(parsed(checker, tmp_path / "rendered.yaml")) == sorted_lists(rendered[name])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", FOLDERS)
def test_manifests_are_valid(checker: Path, rendered: dict[str, list[Document]], name: str, version: str) -> None:
    assert not problem(checker, rendered[name], version)


@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("base/autoscaler.yaml", "minReplicas: 2", "minReplica: 2"),
        ("base/autoscaler.yaml", "maxReplicas: 8", "maxReplicas: many"),
        ("base/deployment.yaml", "image: registry.example.com/vllm-meridian:0.32.0", "image: 3"),
        ("base/network-policy.yaml", "{port: http}", "{ports: http}"),
        ("leader-worker-set/leader-worker-set.yaml", "mountPath: /run", "mountPaths: /run"),
    ],
)
def test_the_check_finds_mistakes(checker: Path, tmp_path: Path, file: str, right: str, wrong: str) -> None:
    text = (FOLDER / file).read_text()
    assert right in text
    (tmp_path / "wrong.yaml").write_text(text.replace(right, wrong))
    assert problem(checker, parsed(checker, tmp_path / "wrong.yaml"))


@pytest.mark.parametrize("name", FOLDERS)
def test_the_configuration_is_meridians(rendered: dict[str, list[Document]], name: str, tmp_path: Path) -> None:
    (tmp_path / "meridian.toml").write_text(one(rendered[name], "ConfigMap")["data"]["meridian.toml"])
    config, sample = load_config(tmp_path / "meridian.toml"), load_config(DEPLOY / "meridian.toml")
    assert config.policy.watch
    assert (config.admin, config.telemetry) == (sample.admin, sample.telemetry)
    dispatch = config.policy.dispatch
    assert dispatch.source.startswith("oci://") == bool(config.policy.trusted_keys) == (name == POLICY_OCI)
    if name in (BASE, GROUPS):
        assert (config.policy, dispatch.mode) == (sample.policy, "shadow")


@pytest.mark.parametrize("name", FOLDERS)
def test_what_a_pod_names_is_there(rendered: dict[str, list[Document]], name: str) -> None:
    for template in pods(rendered[name]):
        pod = template["spec"]
        containers = pod["containers"]
        mounts = [mount for container in containers for mount in container["volumeMounts"]]
        assert {mount["name"] for mount in mounts} == {volume["name"] for volume in pod["volumes"]}
        # Kubernetes does not update a file that is mounted alone.
        assert not any("subPath" in mount for mount in mounts)
        # vLLM's image has a name for this user. Its group reads the files of Secrets.
        assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["fsGroup"]) == (2000, 2000)
    pod = pods(rendered[name])[0]["spec"]
    (serving,) = pod["containers"]
    environment = {each["name"]: each["value"] for each in serving["env"]}
    config = one(rendered[name], "ConfigMap")
    named = re.findall(r'"(/[^"]+)"', config["data"]["meridian.toml"])
    paths = [mount["mountPath"] for mount in serving["volumeMounts"]]
    for path in (*named, *(value for value in environment.values() if value.startswith("/"))):
        assert any(path.startswith(mounted) for mounted in paths), path
    assert environment["MERIDIAN_CONFIG"].endswith("/meridian.toml")
    assert {"name": "config", "configMap": {"name": config["metadata"]["name"]}} in pod["volumes"]


@pytest.mark.parametrize("name", FOLDERS)
def test_ports_and_labels_are_those_of_the_pods(rendered: dict[str, list[Document]], name: str) -> None:
    documents = rendered[name]
    leader, *workers = pods(documents)
    labels = leader["metadata"]["labels"]
    # No Service, scrape or metric reaches a worker.
    assert not any(worker["metadata"]["labels"].items() & labels.items() for worker in workers)
    monitor, policy = one(documents, "PodMonitor"), one(documents, "NetworkPolicy", "reasoner")
    service = one(documents, "Service")
    assert service["spec"]["selector"] == labels
    for selector in (monitor["spec"]["selector"], policy["spec"]["podSelector"]):
        assert selector == {"matchLabels": labels}

    (serving,) = leader["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in serving["ports"]}
    engines = next((int(arg.partition("=")[2]) for arg in serving["args"] if "--data-parallel-size=" in arg), 1)
    toml = one(documents, "ConfigMap")["data"]["meridian.toml"]
    (first,) = re.findall(r'prometheus = "0\.0\.0\.0:(\d+)\+\{rank\}"', toml)
    metrics = {f"metrics-{rank}": int(first) + rank for rank in range(engines)}
    assert ports == {"http": 8000} | metrics
    assert "--port=8000" in serving["args"]
    assert service["spec"]["ports"] == [{"name": "http", "port": 80, "targetPort": "http"}]
    scraped = [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]]
    clients, monitoring = policy["spec"]["ingress"]
    assert clients == {"ports": [{"port": "http"}]}
    assert [each["port"] for each in monitoring["ports"]] == scraped
    # The base has two engines in a pod, a group has one.
    assert metrics.keys() <= set(scraped)
    for kind in ("startupProbe", "readinessProbe"):
        assert serving[kind]["httpGet"]["port"] in ports
    assert not any("ports" in container for worker in workers for container in worker["spec"]["containers"])


@pytest.mark.parametrize("name", FOLDERS)
def test_the_autoscaler_reads_metrics_of_meridian(checker: Path, rendered: dict[str, Any], name: str) -> None:
    spec = one(rendered[name], "HorizontalPodAutoscaler")["spec"]
    target = one(rendered[name], spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
    assert target["apiVersion"] == spec["scaleTargetRef"]["apiVersion"]
    # The autoscaler decides, not the manifest.
    assert "replicas" not in target["spec"]
    (adapter,) = parsed(checker, FOLDER / "prometheus-adapter.yaml")
    (rule,) = adapter["rules"]["custom"]
    (series,) = re.findall(r'__name__=~"(.+?)"', rule["seriesQuery"])
    documented = re.findall(r"^\| `(\w+)", (ROOT / "docs/src/metrics.md").read_text(), re.M)
    asked = {metric["pods"]["metric"]["name"] for metric in spec["metrics"]}
    assert asked == {metric for metric in documented if re.search(series, metric)}


def test_the_options_are_vllms(rendered: dict[str, list[Document]]) -> None:
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def options(container: Document, rank: int) -> tuple[Any, AsyncEngineArgs]:
        words = [*container["command"][2:], *container["args"]]
        words = [word.replace("$(LWS_WORKER_INDEX)", str(rank)) for word in words]
        args: Any = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
        return args, AsyncEngineArgs.from_cli_args(args)

    for name, documents in rendered.items():
        for rank, template in enumerate(pods(documents)):
            (container,) = template["spec"]["containers"]
            args, made = options(container, rank)
            assert made.scheduler_cls == "meridian.vllm.MeridianScheduler"
            assert made.shutdown_timeout < template["spec"]["terminationGracePeriodSeconds"]
            assert args.headless == (rank > 0)
            if name != GROUPS:
                assert (made.data_parallel_size, args.api_server_count) == (2, 2)
                continue
            size = one(documents, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]["size"]
            assert (made.node_rank, made.nnodes, made.distributed_executor_backend) == (rank, size, "mp")
            gpus = int(container["resources"]["limits"]["nvidia.com/gpu"]) * size
            assert made.tensor_parallel_size * made.pipeline_parallel_size == gpus


def test_the_image_is_that_of_the_dockerfile(rendered: dict[str, list[Document]]) -> None:
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text()
    (version,) = re.findall(r"^ARG VLLM_VERSION=(.+)$", dockerfile, re.M)
    templates = [template["spec"] for documents in rendered.values() for template in pods(documents)]
    containers = [each for pod in templates for each in pod["containers"]]
    assert {each["image"] for each in containers} == {f"registry.example.com/vllm-meridian:{version}"}
    assert "USER 2000:0" in dockerfile
