"""Serves the small model on two nodes of a local Ray cluster, and changes the policy of both replicas by the broadcasts
of Ray Serve LLM. Needs Ray on the path (`scripts/fetch.sh ray`); prints one JSON object.

    ray_fleet.py FOLDER TOKEN
"""

# Only the folder of `scripts/fetch.sh ray` has Ray.
# pyright: reportMissingImports=false

from __future__ import annotations

import http.client
import json
import socket
import sys
from pathlib import Path
from typing import Any

import ray
from meridian.vllm.bench.model import model_dir
from ray import serve
from ray.cluster_utils import Cluster
from ray.llm._internal.serve.core.ingress.dev_ingress import build_dev_openai_app
from ray.llm._internal.serve.utils.broadcast import broadcast
from ray.serve.llm import LLMConfig
from serving import ask, free_port

MODEL = "tiny-random"


def of_node() -> dict[str, Any]:
    """What a node of the cluster has: room for one replica."""
    return {"num_cpus": 4, "resources": {"replica": 1}, "object_store_memory": 100 << 20}


def serving(port: int) -> None:
    """Start two replicas, one on each node, behind Ray Serve's HTTP proxy."""
    config = LLMConfig(
        model_loading_config={"model_id": MODEL, "model_source": str(model_dir())},
        accelerator_config={"kind": "cpu"},
        deployment_config={
            "num_replicas": 2,
            "ray_actor_options": {"num_cpus": 1, "resources": {"replica": 1}},
            "health_check_timeout_s": 300,
        },
        placement_group_config={"bundles": [{"CPU": 1}], "strategy": "STRICT_PACK"},
        engine_kwargs={
            "max_model_len": 512,
            "block_size": 32,
            "enforce_eager": True,
            "max_num_seqs": 4,
            "scheduler_cls": "meridian.vllm.MeridianScheduler",
        },
        log_engine_metrics=False,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
    serve.run(build_dev_openai_app({"llm_configs": [config]}))


def active(folder: Path) -> dict[int, str]:
    """The policy that decides in each engine process, asked over its private socket."""
    found = {}
    for file in (folder / "run" / "meridian").glob("*.json"):
        process = json.loads(file.read_text())
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(process["socket"].removeprefix("unix:"))
        connection.request("GET", "/v1/policies")
        found[process["pid"]] = json.loads(connection.getresponse().read())["slots"][0]["active"]["name"]
    return found


def replicas() -> list[dict[str, Any]]:
    """The actors with an engine."""
    actors = ray._private.state.actors().values()
    return [each for each in actors if each["State"] == "ALIVE" and "LLMServer" in each["Name"]]


def admin(token: str, source: str) -> dict[str, str]:
    """The arguments of `meridian_admin` for a native policy."""
    return {"request": "PUT /v1/policies/dispatch", "token": token, "body": json.dumps({"source": source})}


def main(folder: Path, token: str) -> dict[str, Any]:
    """Everything that the test looks at."""
    cluster = Cluster(initialize_head=True, head_node_args=of_node())
    cluster.add_node(**of_node())
    ray.init(address=cluster.address, log_to_driver=False)
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    try:
        serving(port)
        said: dict[str, Any] = {"before": active(folder)}
        said["nodes"] = len({each["Address"]["NodeID"] for each in replicas()})
        # By a handle: Ray logs no arguments.
        deployment = next(name for name in serve.status().applications["default"].deployments if "LLMServer" in name)
        handle = serve.get_deployment_handle(deployment, "default")
        call = {"method": "meridian_admin", "kwargs": admin(token, "native:fcfs")}
        said["by_handle"] = broadcast(handle, "collective_rpc", kwargs=call)
        said["after_handle"] = active(folder)
        logs = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"
        said["token_in_logs"] = any(token.encode() in file.read_bytes() for file in logs.rglob("*.log"))
        # By Ray's route.
        route = {"model": MODEL, "method": "meridian_admin", "kwargs": admin(token, "native:srpt")}
        said["by_route"] = ask(base, "POST", "/collective_rpc", route)
        said["after_route"] = active(folder)
        wrong = {"model": MODEL, "method": "meridian_admin", "kwargs": admin(token + "x", "native:balanced")}
        said["with_a_wrong_token"] = ask(base, "POST", "/collective_rpc", wrong)
        said["after_refusal"] = active(folder)
        completion = {"model": MODEL, "prompt": "hello", "max_tokens": 8, "ignore_eos": True}
        said["completion"] = ask(base, "POST", "/v1/completions", completion)
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
    return said


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))
