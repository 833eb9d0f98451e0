"""One engine of one way: makes it, sends the requests of the situations, returns what came back as JSON values."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import TYPE_CHECKING, Any

from outputs import SCRIPT
from outputs.models import ADAPTER, folder
from outputs.situations import Ask, Engine, Post, Session, Situation

if TYPE_CHECKING:
    from vllm.v1.engine import PauseMode

MERIDIAN = {
    "scheduler_cls": "meridian.vllm.MeridianScheduler",
    "logits_processors": ["meridian.vllm:BudgetLogitsProcessor"],
}
STOCK, WITH = "stock", "meridian"
SERVED = "m"
READY = "Application startup complete"
BASE = {
    "max_model_len": 4096,
    "block_size": 32,
    "max_num_seqs": 16,
    "dtype": "float32",
    "enforce_eager": True,
    "seed": 0,
}
# Random or of the clock in every answer of the server.
VOLATILE = {"id", "created", "created_at", "completed_at", "item_id", "request_id", "response_id", "tool_call_id"}
VOLATILE |= {"call_id", "system_fingerprint", "timestamp", "signature"}
# In a stream, vLLM counts these anew from the text of each chunk, and the cuts are not the same twice.
VOLATILE_IN_STREAMS = {"sequence_number", "reasoning_tokens"}
_STOP_LIMIT_S = 60
# The ways to pause that lose no request: those that run end first, or all are preempted and computed again.
_MODES: tuple[PauseMode, ...] = ("wait", "keep")
_TOKENS_A_PAUSE = 16


def options_of(engine: Engine, side: str) -> dict[str, Any]:
    """The engine's arguments; stock and Meridian differ in the two classes only."""
    options = {"model": str(folder(engine.model)), **BASE, **engine.options}
    processors = ["outputs.scripted:Script"] if engine.has_script else []
    if side == WITH:
        options["scheduler_cls"] = MERIDIAN["scheduler_cls"]
        if engine.has_processors:
            processors += MERIDIAN["logits_processors"]
    if processors:
        options["logits_processors"] = processors
    return options


def sampling(params: dict[str, Any], **more: Any) -> Any:
    """vLLM's own object; `script` is an extra argument."""
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": 48, **params, **more}
    if SCRIPT in fields:
        fields["extra_args"] = {SCRIPT: fields.pop(SCRIPT), **fields.get("extra_args", {})}
    for name, kind in (
        ("structured_outputs", StructuredOutputsParams),
        ("repetition_detection", RepetitionDetectionParams),
    ):
        if name in fields:
            fields[name] = kind(**fields[name])
    return SamplingParams(**fields)


def _number(value: float) -> Any:
    """JSON has no infinity."""
    return value if math.isfinite(value) else str(value)


def _logprobs(steps: Any) -> Any:
    if steps is None:
        return None
    return [
        step and {str(token): [_number(x.logprob), x.rank, x.decoded_token] for token, x in step.items()}
        for step in steps
    ]


def _answer(done: Any) -> dict[str, Any]:
    """All of a vLLM `RequestOutput` that a client sees."""
    return {
        "prompt_tokens": done.prompt_token_ids,
        "cached_tokens": done.num_cached_tokens,
        "prompt_logprobs": _logprobs(done.prompt_logprobs),
        "outputs": [
            {
                "text": x.text,
                "ids": list(x.token_ids),
                "finish": x.finish_reason,
                "stop": x.stop_reason,
                "cumulative_logprob": None if x.cumulative_logprob is None else _number(x.cumulative_logprob),
                "logprobs": _logprobs(x.logprobs),
            }
            for x in done.outputs
        ],
    }


def _refusal(why: Exception) -> dict[str, Any]:
    return {"error": type(why).__name__, "text": str(why)}


def _prompt(given: str | Sequence[int] | dict[str, Any]) -> Any:
    if isinstance(given, dict):
        import numpy

        rng = numpy.random.default_rng(given["noise"])
        sound = rng.standard_normal(16_000).astype(numpy.float32)
        return {"prompt": given["text"], "multi_modal_data": {"audio": (sound, 16_000)}}
    return given if isinstance(given, str) else {"prompt_token_ids": list(given)}


class Offline:
    """`vllm.LLM`. The requests of a situation arrive together."""

    def __init__(self, engine: Engine, side: str) -> None:
        from vllm import LLM

        self._engine = engine
        self._llm = LLM(**options_of(engine, side), disable_log_stats="speculative_config" not in engine.options)

    def play(self, situation: Situation) -> list[Any]:
        """An answer a request."""
        # Except for what is about the cache, a situation does not depend on those before it.
        self._llm.reset_prefix_cache()
        if self._engine.embeds:
            done: Any = self._llm.embed([_prompt(x.prompt) for x in situation.requests], use_tqdm=False)
            return [{"embedding": x.outputs.embedding, "prompt_tokens": x.prompt_token_ids} for x in done]
        batches = [[x] for x in situation.requests] if situation.one_by_one else [list(situation.requests)]
        from vllm.exceptions import VLLMClientError

        answers: list[Any] = []
        for batch in batches:
            try:
                answers += [_answer(x) for x in self._generate(batch)]
            except (ValueError, VLLMClientError) as why:
                answers.append(_refusal(why))
            if situation.sleeps:
                self._llm.sleep(1)
                self._llm.wake_up()
        return answers

    def _generate(self, asks: list[Any]) -> list[Any]:
        adapters = None
        if any(x.adapter for x in asks):
            from vllm.lora.request import LoRARequest

            adapter = LoRARequest(ADAPTER, 1, str(folder(ADAPTER)))
            adapters = [adapter if x.adapter else None for x in asks]
        return self._llm.generate(
            [_prompt(x.prompt) for x in asks],
            [sampling(x.params) for x in asks],
            lora_request=adapters,  # type: ignore[arg-type]
            priority=[x.priority for x in asks] if any(x.priority for x in asks) else None,
            use_tqdm=False,
        )

    def accepted(self) -> int:
        """Draft tokens that were accepted so far."""
        values: Any = {metric.name: metric for metric in self._llm.get_metrics()}
        return values["vllm:spec_decode_num_accepted_tokens"].value

    def close(self) -> None:
        """The process ends right after."""


class Sessions:
    """`AsyncLLM.generate`: for a session with a `StreamingInput` a turn, the next one when the one before is over."""

    def __init__(self, engine: Engine, side: str) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._loop = asyncio.new_event_loop()
        self._pauses = engine.pauses
        self._enough = asyncio.Event()
        self._heard = 0
        self._paused: Counter[str] = Counter()
        arguments = AsyncEngineArgs(**options_of(engine, side), disable_log_stats=True)

        async def make() -> AsyncLLM:
            return AsyncLLM.from_engine_args(arguments)

        self._llm = self._loop.run_until_complete(make())

    def play(self, situation: Situation) -> list[Any]:
        """A list of turns a session, or an answer a request; all run at once."""

        async def all_of_them() -> list[Any]:
            await self._llm.reset_prefix_cache()
            ask: Any = self._ask if self._pauses else self._session
            asked = asyncio.gather(*(ask(f"{situation.name}-{i}", x) for i, x in enumerate(situation.requests)))
            if not self._pauses:
                return await asked
            self._paused.clear()
            pausing = self._loop.create_task(self._pause())
            await asyncio.wait((asked, pausing), return_when=asyncio.FIRST_COMPLETED)
            if pausing.done():
                # It ends only by what it raises.
                await pausing
            pausing.cancel()
            await self._llm.resume_generation()
            assert set(self._paused) == set(_MODES), self._paused
            return await asked

        return self._loop.run_until_complete(all_of_them())

    async def _pause(self) -> None:
        """As for new weights, again and again."""
        for mode in cycle(_MODES):
            self._enough.clear()
            await self._enough.wait()
            await self._llm.pause_generation(mode=mode)
            self._paused[mode] += 1
            await self._llm.resume_generation()

    async def _ask(self, name: str, ask: Ask) -> Any:
        """An answer; every so many tokens of all requests, they are paused."""
        last: Any = None
        seen = 0
        async for last in self._llm.generate(_prompt(ask.prompt), sampling(ask.params), name):
            new, seen = len(last.outputs[0].token_ids) - seen, len(last.outputs[0].token_ids)
            self._heard += new
            if self._heard >= _TOKENS_A_PAUSE:
                self._heard = 0
                self._enough.set()
        return _answer(last)

    async def _session(self, name: str, session: Session) -> Any:
        from vllm.engine.protocol import StreamingInput
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        tokenizer: Any = self._llm.get_tokenizer()
        params = [sampling(x, output_kind=RequestOutputKind.DELTA) for _, x in session.turns]
        is_over = asyncio.Event()

        async def inputs() -> AsyncGenerator[StreamingInput, None]:
            for (text, _), own in zip(session.turns, params, strict=True):
                ids = tokenizer.encode(text, add_special_tokens=False)
                yield StreamingInput(prompt=tokens_input(ids), sampling_params=own)
                await is_over.wait()
                is_over.clear()

        turns: list[Any] = []
        text, ids, logprobs = "", list[int](), list[Any]()
        try:
            async for output in self._llm.generate(inputs(), params[0], name):
                (said,) = output.outputs
                text += said.text
                ids += said.token_ids
                logprobs += _logprobs(said.logprobs) or []
                if said.finish_reason is None and len(ids) < params[min(len(turns), len(params) - 1)].max_tokens:
                    continue
                if not ids and said.finish_reason is None:
                    continue
                why = {"finish": said.finish_reason, "stop": said.stop_reason}
                turns.append({"text": text, "ids": ids, "logprobs": logprobs, **why})
                text, ids, logprobs = "", [], []
                is_over.set()
        except (ValueError, VLLMClientError) as why:
            turns.append(_refusal(why))
        return turns

    def close(self) -> None:
        """End the engine process."""
        self._llm.shutdown()


# Texts that each chunk of a stream repeats.
_REPEATED = {"object", "model", "role", "type", "finish_reason", "stop_reason", "name"}


def _joined(values: list[Any], key: str = "") -> Any:
    """One value of those that the chunks of a stream have in one place."""
    values = [x for x in values if x is not None]
    if not values:
        return None
    if all(isinstance(x, dict) for x in values):
        names = dict.fromkeys(name for x in values for name in x)
        return {name: _joined([x.get(name) for x in values], name) for name in names}
    if all(isinstance(x, list) for x in values):
        items = [item for x in values for item in x]
        if not all(isinstance(x, dict) and "index" in x for x in items):
            return items
        return [_joined([x for x in items if x["index"] == i]) for i in sorted({x["index"] for x in items})]
    if all(isinstance(x, str) for x in values) and key not in _REPEATED:
        return "".join(values)
    return values[-1]


def _chunks(events: Iterator[tuple[str, Any]]) -> list[Any]:
    """A stream without its cuts, which depend on how fast the client reads: neighbours of one kind are joined."""
    groups: list[tuple[Any, list[Any]]] = []
    for kind, data in events:
        place: Any = [kind]
        if isinstance(data, dict):
            data = _stable(data, VOLATILE | VOLATILE_IN_STREAMS)
            delta = data.get("delta")
            place += [data.get(x) for x in ("index", "output_index", "content_index")]
            place.append(delta.get("type") if isinstance(delta, dict) else None)
        can_join = kind in ("", "content_block_delta") or kind.endswith(".delta")
        if can_join and groups and groups[-1][0] == place:
            groups[-1][1].append(data)
        else:
            groups.append((place, [data]))
    return [[place[0], _joined(values)] for place, values in groups]


def _stable(value: Any, without: set[str] = VOLATILE) -> Any:
    """Without identifiers that are made up for each request, and times."""
    if isinstance(value, dict):
        return {key: _stable(x, without) for key, x in value.items() if key not in without}
    return [_stable(x, without) for x in value] if isinstance(value, list) else value


def _events(body: str) -> Iterator[tuple[str, Any]]:
    """Kind and data of each server-sent event."""
    for block in body.split("\n\n"):
        kind, data = "", ""
        for line in block.splitlines():
            name, _, value = line.partition(": ")
            kind, data = (value, data) if name == "event" else (kind, data + value if name == "data" else data)
        if data:
            yield ("end", data) if data == "[DONE]" else (kind, json.loads(data))


class Http:
    """`vllm serve`, forked from this process; one request at a time."""

    def __init__(self, engine: Engine, side: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._base = f"http://127.0.0.1:{port}"
        options = options_of(engine, side)
        command = ["serve", options.pop("model"), "--served-model-name", SERVED]
        command += ["--host", "127.0.0.1", "--port", str(port), *engine.serve_arguments]
        for name, value in options.items():
            option = "--" + name.replace("_", "-")
            if isinstance(value, list):
                command += [option, *map(str, value)]
            elif isinstance(value, dict):
                command += [option, json.dumps(value)]
            elif value is True:
                command.append(option)
            else:
                command += [option, str(value)]
        reader, writer = os.pipe()
        self._server = os.fork()
        if not self._server:
            os.close(reader)
            _serve(command, writer)
        os.close(writer)
        self._wait_until_ready(reader, port)

    def _wait_until_ready(self, reader: int, port: int) -> None:
        with os.fdopen(reader, errors="replace") as log:
            for line in log:
                print(line, end="", flush=True)
                if READY in line:
                    break
            else:
                raise RuntimeError("the server did not start, see its log")
            # The line comes before the socket listens, and nothing is printed when it does.
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=10).close()
                    break
                except ConnectionRefusedError as refused:
                    if os.waitpid(self._server, os.WNOHANG)[0]:
                        raise RuntimeError("the server ended while it started, see its log") from refused
                    os.sched_yield()
            self._log = os.dup(log.fileno())
        # The pipe must not fill up while requests run.
        self._drain = subprocess.Popen(("cat",), stdin=self._log)

    def play(self, situation: Situation) -> list[Any]:
        """Status and body of each request."""
        if self._ask(Post("/reset_prefix_cache", {}))["status"] != 200:
            raise RuntimeError("the engine behind the server is dead, see its log")
        return [self._ask(x if isinstance(x, Post) else completion(x)) for x in situation.requests]

    def _ask(self, post: Post) -> Any:
        body = post.body if isinstance(post.body, str) else json.dumps(post.body)
        data = None if post.is_get else body.encode()
        request = urllib.request.Request(self._base + post.path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                status, text, kind = response.status, response.read().decode(), response.headers.get_content_type()
        except urllib.error.HTTPError as refused:
            status, text, kind = refused.code, refused.read().decode(), refused.headers.get_content_type()
        if kind == "text/event-stream":
            return {"status": status, "events": _chunks(_events(text))}
        try:
            return {"status": status, "body": _stable(json.loads(text))}
        except ValueError:
            return {"status": status, "body": text}

    def close(self) -> None:
        """Ctrl-C, then by force."""
        os.killpg(self._server, signal.SIGINT)
        with _limit(_STOP_LIMIT_S, self._server):
            os.waitpid(self._server, 0)
        self._drain.kill()
        self._drain.wait()


@contextmanager
def _limit(seconds: int, group: int) -> Iterator[None]:
    """Kill a process group that takes longer."""

    def kill(number: int, frame: Any) -> None:
        del number, frame
        os.killpg(group, signal.SIGKILL)

    before = signal.signal(signal.SIGALRM, kill)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _serve(command: list[str], log: int) -> None:
    """Become `vllm serve`; does not return."""
    import sys

    status = 1
    try:
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["vllm", *command]
        from vllm.entrypoints.cli.main import main

        main()
        status = 0
    finally:
        os._exit(status)


def completion(ask: Ask) -> Post:
    """The same request for `/v1/completions`."""
    body: dict[str, Any] = {"temperature": 0.0, "max_tokens": 48, **ask.params}
    if SCRIPT in body:
        body["vllm_xargs"] = {SCRIPT: body.pop(SCRIPT), **body.pop("extra_args", {})}
    if "logit_bias" in body:
        body["logit_bias"] = {str(token): bias for token, bias in body["logit_bias"].items()}
    if ask.priority:
        body["priority"] = ask.priority
    prompt = ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt)
    return Post("/v1/completions", {"model": SERVED, "prompt": prompt, "return_token_ids": True, **body})
