"""Do budgets end thinking at their token where an engine spans several processes or machines?

Serves requests over HTTP by tensor parallelism, pipeline parallelism, data parallelism, tensor parallelism over two
machines, and without any API server in Python. A network namespace stands in for a machine, with shared memory, host
name and home folder of its own. Most requests have a budget. The others, of one tenant, are ended by a change of live
budgets that is sent again and again, so that orders cross processes all the time. Each rank samples for itself, and one
without an order would go on with another token. Prompts that end with the forced token must therefore be answered like
the requests themselves. Meanwhile `meridian ctl swap --all` swaps a policy.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from python.tests.vllm.serving import BUDGETS, SCHEDULER, TOKEN, Fleet, ask, configure, free_port

DATA, EXPERTS = "data parallelism, 2 engines", "data parallelism with expert parallelism, 4 engines"
MACHINES, RUST = "two machines, a rank each", "vLLM's front end in Rust"
FORMS = {
    "tensor parallelism, 2 ranks": ("--tensor-parallel-size", "2"),
    # With `torch.compile`: on a CPU, the second stage has its buffers only after the warm-up, which eager mode skips.
    "pipeline parallelism, 2 stages": ("--pipeline-parallel-size", "2", "--no-enforce-eager"),
    DATA: (),
    EXPERTS: ("--enable-expert-parallel", "--worker-extension-cls", "checks.engine.expert_parallel.Extension"),
    MACHINES: ("--tensor-parallel-size", "2", "--nnodes", "2"),
    RUST: (),
}
ENGINES = {DATA: 2, EXPERTS: 4}
# The build of vLLM that carries the front end. It serves for the engine of the version before too.
RUST_BUILD = "0.33.0"
CLIENTS = 16
# A request without a budget of its own is ended by an order at this many tokens or, if it has more, at once; and if no
# order came in time, as on a busy machine, by the operator's limit.
LATER, OPERATORS_LIMIT = 40, 160
# Each which-th request has none, and this tenant.
WITHOUT, LATE = 4, "late"
# Requests whose answer is compared with that to a prompt that ends with the forced token, and its tokens.
COMPARED, ANSWER = 40, 8
CONFIG = f"[scheduler]\nmin_think_tokens = 0\nmax_think_tokens = {OPERATORS_LIMIT}\n[entropy]\nenabled = false\n"
CONFIG += '[policy]\nwatch = false\n[policy.dispatch]\nsource = "{}"\ndeadline_ms = 1000\n'
_NETWORK = "10.77.0"


class Machines:
    """Two network namespaces with a wire between them.

    Raises:
        subprocess.CalledProcessError: this user may not make any.
    """

    def __init__(self) -> None:
        self.names = [f"meridian-{os.getpid()}-{i}" for i in (0, 1)]
        wires = [f"m{os.getpid()}{side}" for side in "ab"]
        for name in self.names:
            _ip("netns", "add", name)
        self.wires = wires
        _ip("link", "add", wires[0], "type", "veth", "peer", "name", wires[1])
        for i, (name, wire) in enumerate(zip(self.names, wires, strict=True)):
            _ip("link", "set", wire, "netns", name)
            inside = ("-n", name)
            _ip(*inside, "addr", "add", f"{_NETWORK}.{i + 1}/24", "dev", wire)
            _ip(*inside, "link", "set", wire, "up")
            _ip(*inside, "link", "set", "lo", "up")

    def run_in(self, number: int) -> list[str]:
        """The beginning of a command in a namespace, with nothing shared but files and time."""
        script = f'hostname machine-{number}; mount -t tmpfs tmpfs /dev/shm; exec "$@"'
        own = ["unshare", "--ipc", "--uts", "--mount", "sh", "-ec", script, "sh"]
        return ["ip", "netns", "exec", self.names[number], *own]

    def environment(self, number: int) -> dict[str, str]:
        """What vLLM and gloo have to know of the network."""
        return {"VLLM_HOST_IP": f"{_NETWORK}.{number + 1}", "GLOO_SOCKET_IFNAME": self.wires[number]}

    def close(self) -> None:
        """Remove them, and the wire with them."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def serving(form: str, folder: Path, config: Path) -> Iterator[Fleet]:
    """A server in this form; over two machines, the caller is in the first of them already."""
    environment = {"VLLM_PLUGINS": "meridian,meridian_admin", "OMP_NUM_THREADS": "1"}
    options = [*SCHEDULER, *BUDGETS, "--dtype", "float32", "--seed", "0", *FORMS[form]]
    if "--no-enforce-eager" in FORMS[form]:
        # vLLM's switch for tests: it traces the model and compiles nothing. With a cold cache, a stage can hang in
        # Inductor while the other waits for it.
        environment["VLLM_CPU_CI_ENV"] = "1"
    engines = ENGINES.get(form, 1)
    if engines == 1:
        # A core a rank.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
        options += ["--distributed-executor-backend", "mp"]
    model = model_of_experts(folder) if form == EXPERTS else None
    if form == RUST:
        environment |= {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": rust_front_end()}
        # It closes a connection after so many idle seconds, a new one too. The default is 5, too few for clients on a
        # busy machine.
        environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = "300"
    follower: Fleet | None = None
    if form == MACHINES:
        options += ["--master-addr", f"{_NETWORK}.1", "--master-port", str(free_port())]
        own = json.loads(os.environ["MERIDIAN_MACHINES"])
        other = folder / "other"
        (other / "run").mkdir(parents=True)
        follower = Fleet(
            other,
            config,
            [*options, "--node-rank", "1", "--headless"],
            environment | own["environments"][1],
            engines,
            prefix=own["prefixes"][1],
        )
        options += ["--node-rank", "0"]
        environment |= own["environments"][0]
    with contextlib.ExitStack() as ends:
        if follower is not None:
            ends.callback(follower.kill)
        fleet = Fleet(folder, config, options, environment, engines, model)
        ends.callback(fleet.kill)
        fleet.wait_until_ready()
        yield fleet
        fleet.stop()


def rust_front_end() -> str:
    """The program, from an environment of its own."""
    fetch = Path(__file__).resolve().parents[2] / "scripts" / "fetch.sh"
    env = {**os.environ, "MERIDIAN_VLLM": RUST_BUILD}
    python = Path(subprocess.check_output([fetch, "vllm"], env=env, text=True).strip())
    (found,) = python.parents[1].glob("lib/python3*/site-packages/vllm/vllm-rs")
    return str(found)


def model_of_experts(folder: Path) -> Path:
    """A Qwen3 with eight experts, random weights, and the tokenizer of the small model."""
    import torch
    from meridian.vllm.bench.model import model_dir
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir())
    config = Qwen3MoeConfig(
        vocab_size=(len(tokenizer) + 63) // 64 * 64,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    made = folder / "experts"
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        # By itself it never says a marker.
        model.lm_head.weight[list(tokenizer.added_tokens_decoder)] = 0
    model.save_pretrained(made, safe_serialization=True)
    tokenizer.save_pretrained(made)
    return made


def end_token() -> tuple[int, int]:
    """The tokens that begin and end thinking."""
    from meridian.vllm.bench.model import model_dir
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir())
    start, end = (tokenizer.encode(text, add_special_tokens=False) for text in ("<think>", "</think>"))
    (first,), (last,) = start, end
    return first, last


def serve(fleet: Fleet, form: str, requests: int, swaps: Sequence[Path]) -> dict[str, Any]:
    """Send the requests, change those without a budget, swap; what went wrong."""
    start, end = end_token()
    rng = random.Random(0)
    prompts = [[*(rng.randrange(10, 500) for _ in range(rng.randint(4, 60))), start] for _ in range(requests)]
    budgets = [None if i % WITHOUT == WITHOUT - 1 else rng.randint(0, LATER - 1) for i in range(requests)]
    is_over = threading.Event()
    failures: list[str] = []
    listener = f"http://{fleet.found()[0]['admin']}"

    def change() -> None:
        while not is_over.is_set():
            # An engine refuses it while nobody of the tenant thinks.
            body = {"tenant": LATE, "max_think_tokens": LATER}
            if form == RUST:
                # There is no API server with Meridian's routes.
                ask(listener, "PUT", "/v1/budgets", body, {"Authorization": f"Bearer {TOKEN}"})
            else:
                fleet.admin("PUT", "/budgets", body)
            is_over.wait(0.2)

    def answered(i: int) -> list[int]:
        budget = budgets[i]
        own = {"meridian_tenant": LATE} if budget is None else {"meridian_think_budget": budget}
        tokens = (OPERATORS_LIMIT if budget is None else budget) + 1 + ANSWER
        try:
            return fleet.generate(prompt=prompts[i], max_tokens=tokens, vllm_xargs=own)["choices"][0]["token_ids"]
        except (OSError, RuntimeError, LookupError) as error:
            failures.append(f"request {i}: {error}")
            return []

    changing = threading.Thread(target=change)
    changing.start()
    swapped = 0
    try:
        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = pool.map(answered, range(requests))
            for path in swaps:
                code, said = fleet.ctl("swap", "dispatch", str(path), "--all")
                swapped += code == 0
                if code != 0:
                    failures.append(f"a swap: {said}")
            tokens = list(answers)
    finally:
        is_over.set()
        changing.join()
    missed, ordered = [], 0
    for i, (budget, own) in enumerate(zip(budgets, tokens, strict=True)):
        at = own.index(end) if end in own else None
        if at is None or (at != budget if budget is not None else at < LATER):
            missed.append(f"request {i}: ended at {at}, its budget is {budget}")
        ordered += budget is None and at is not None and at < OPERATORS_LIMIT
    compared = to_compare(tokens, budgets, end)
    same = 0
    for i, at in compared:
        thought, answer = tokens[i][: at + 1], tokens[i][at + 1 : at + 1 + ANSWER]
        again = fleet.generate(prompt=[*prompts[i], *thought], max_tokens=ANSWER)["choices"][0]["token_ids"]
        same += again == answer
    for line in (*failures[:3], *missed[:3]):
        print(line, file=sys.stderr)
    return {
        "requests": requests,
        "served": sum(map(bool, tokens)),
        "missed": len(missed),
        "ordered": ordered,
        "without": sum(budget is None for budget in budgets),
        "answers": len(compared),
        "same_answers": same,
        "swaps": len(swaps),
        "swapped": swapped,
        "failures": len(failures),
    }


def to_compare(tokens: Sequence[list[int]], budgets: Sequence[int | None], end: int) -> list[tuple[int, int]]:
    """Requests whose answer has enough tokens, with the place of their end: of both kinds as many."""
    found = []
    for has_budget in (True, False):
        of_kind = [i for i, budget in enumerate(budgets) if (budget is not None) == has_budget and end in tokens[i]]
        places = [(i, tokens[i].index(end)) for i in of_kind]
        found += [(i, at) for i, at in places if len(tokens[i]) > at + ANSWER][: COMPARED // 2]
    return found


def one(form: str, component: str, requests: int, swaps: int) -> dict[str, Any]:
    """One form of serving."""
    text = Path(component).read_bytes()
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as name:
        folder = Path(name)
        (folder / "start.wasm").write_bytes(text)
        versions = []
        for i in range(swaps):
            # Another version of the same: an empty custom section at its end.
            versions.append(folder / f"version-{i}.wasm")
            versions[-1].write_bytes(text + bytes([0, 2, 1, 97 + i % 26]))
        with serving(form, folder, configure(folder, CONFIG.format(folder / "start.wasm"))) as fleet:
            found = serve(fleet, form, requests, versions)
            engines = fleet.ctl("status", "--all")[1]["processes"]
        gave_up = fleet.log().count("this engine goes on as stock vLLM")
    return {"form": form, **found, "engines": len(engines), "gave_up": gave_up}


def on_two_machines(component: str, requests: int, swaps: int) -> dict[str, Any]:
    """The same, in a process of its own on the first machine."""
    machines = Machines()
    try:
        own = {
            "prefixes": [machines.run_in(i) for i in (0, 1)],
            "environments": [machines.environment(i) for i in (0, 1)],
        }
        command = [*machines.run_in(0), sys.executable, "-m", "checks.engine.parallel", component]
        environment: Mapping[str, str] = {**os.environ, "MERIDIAN_MACHINES": json.dumps(own)}
        done = subprocess.run(
            [*command, str(requests), str(swaps)], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        return json.loads(done.stdout.splitlines()[-1])
    finally:
        machines.close()


def measure(component: str, form: str, requests: int = 200, swaps: int = 4) -> dict[str, Any]:
    """One form of serving, of `FORMS`."""
    return on_two_machines(component, requests, swaps) if form == MACHINES else one(form, component, requests, swaps)


if __name__ == "__main__":
    # On the first machine.
    print(json.dumps(one(MACHINES, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
