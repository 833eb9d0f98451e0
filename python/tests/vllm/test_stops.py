"""`[model] stop_strings = "answer"`: stop strings of clients bind in the answer only, and nothing else changes.

Most tests feed vLLM's own output processor with made-up steps. The last ones use the real engine, whose model says what
a script says.
"""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import fresh
import pytest
from meridian.config import MeridianConfig, ModelConfig
from meridian.vllm import plugin, stops
from meridian.vllm.bench.model import model_dir
from meridian.vllm.bench.run import ENVIRONMENT
from meridian.vllm.markers import TokenMarkers
from meridian.vllm.stops import Rules, Thought, follow
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason, detokenizer
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import OutputProcessor

HERE = Path(__file__).resolve().parent
KINDS = ("fast", "slow")
NEVER = "\x00"


@cache
def tokenizer() -> Any:
    """That of the small model: its markers are tokens that show."""
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(str(model_dir()))


def ids(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


def rules(resumes: bool = True) -> Rules:
    model = ModelConfig(resumes=resumes)
    turns = frozenset(ids("<|im_start|>"))
    return Rules.of(TokenMarkers([ids("<think>")], [ids("</think>")], boundaries=turns, model=model))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which of vLLM's detokenizers is used."""
    if request.param == "slow":
        monkeypatch.setattr(detokenizer, "uses_fast_detokenizer", lambda tokenizer: False)
    return request.param


@dataclass
class Seen:
    """The outputs of one request until its end."""

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    stop: int | str | None = None
    aborted: bool = False

    @property
    def text(self) -> str:
        return "".join(self.texts)


def made(name: str, prompt: Sequence[int], params: SamplingParams, resumable: bool = False) -> EngineCoreRequest:
    """A request as vLLM's front end has it."""
    return EngineCoreRequest(
        request_id=name,
        external_req_id=name,
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        resumable=resumable,
    )


def run(
    steps: Sequence[Sequence[int]],
    prompt: Sequence[int],
    stop: Sequence[str],
    follows: Rules | None,
    finish: FinishReason | None = FinishReason.LENGTH,
    **fields: Any,
) -> Seen:
    """A request whose tokens arrive in these steps, streamed; `finish` is the engine's reason in the last one."""
    processor = OutputProcessor(tokenizer(), log_stats=False)
    if follows is not None:
        follow(processor, follows)
    params = SamplingParams(stop=list(stop), output_kind=RequestOutputKind.DELTA, max_tokens=10_000, **fields)
    processor.add_request(made("a", prompt, params), None)
    seen = Seen()
    for number, tokens in enumerate(steps, 1):
        reason = finish if number == len(steps) else None
        output = EngineCoreOutput(request_id="a", new_token_ids=list(tokens), finish_reason=reason)
        done = processor.process_outputs([output])
        seen.aborted = bool(done.reqs_to_abort)
        each: Any
        for each in done.request_outputs:
            (choice,) = each.outputs
            seen.texts.append(choice.text)
            seen.tokens += choice.token_ids
            seen.finish, seen.stop = choice.finish_reason, choice.stop_reason
        if seen.finish is not None:
            break
    return seen


def one_by_one(text: str) -> list[list[int]]:
    return [[token] for token in ids(text)]


THINKING = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
PLAIN = "<|im_start|>user\nsay <think><|im_end|>\n<|im_start|>assistant\n"
NO_THINKING = PLAIN + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("prompt", "generated", "stop", "text", "matched"),
    [
        (THINKING, "a STOP b</think>c STOP d", "STOP", "a STOP b</think>c ", "STOP"),
        # Never out of its thinking.
        (THINKING, "a STOP b", "STOP", "a STOP b", None),
        # In the prompt, a user's marker counts for nothing.
        (PLAIN, "a STOP b", "STOP", "a ", "STOP"),
        (NO_THINKING, "a STOP b", "STOP", "a ", "STOP"),
        # It opens anywhere, and again.
        (PLAIN, "a<think>STOP</think>b STOP", "STOP", "a<think>STOP</think>b ", "STOP"),
        (NO_THINKING, "a<think>STOP</think>b<think>STOP</think>c STOP", "STOP", None, "STOP"),
        (THINKING, "STOP</think>a<think>STOP", "STOP", "STOP</think>a<think>STOP", None),
        # Markers are thinking, and no stop string reaches over one.
        (THINKING, "a</think>b", "</think>", "a</think>b", None),
        (THINKING, "a</think>b c", "k>b", "a</think>b c", None),
        (THINKING, "a</think>b<think>c", "b<", "a</think>b<think>c", None),
        (THINKING, "a</think>bb", ">bb", "a</think>bb", None),
        (THINKING, "ab</think>ab", "ab", "ab</think>", "ab"),
    ],
)
def test_stop_strings_bind_in_the_answer(
    kind: str, prompt: str, generated: str, stop: str, text: str | None, matched: str | None
) -> None:
    seen = run(one_by_one(generated), ids(prompt), [stop], rules())
    assert seen.text == (generated.rpartition(stop)[0] if text is None else text)
    assert (seen.finish, seen.stop) == (("length", None) if matched is None else ("stop", matched))
    # The same, if all tokens come in one step, as with speculative decoding.
    at_once = run([ids(generated)], ids(prompt), [stop], rules())
    assert (at_once.text, at_once.tokens, at_once.stop) == (seen.text, seen.tokens, seen.stop)


def test_a_model_that_thinks_once() -> None:
    generated = "a</think>b<think>STOP</think>"
    assert run(one_by_one(generated), ids(THINKING), ["STOP"], rules(resumes=True)).text == generated
    assert run(one_by_one(generated), ids(THINKING), ["STOP"], rules(resumes=False)).text == "a</think>b<think>"
    assert run(one_by_one("<think>STOP"), ids(NO_THINKING), ["STOP"], rules(resumes=False)).text == "<think>"
    assert run(one_by_one("<think>STOP"), ids(PLAIN), ["STOP"], rules(resumes=False)).text == "<think>STOP"


def test_markers_of_several_tokens_and_tool_calls() -> None:
    markers = TokenMarkers(starts=[[1, 2], [3]], ends=[[2, 1, 2]], calls=[([9, 8], [7])], call_ends_thinking=True)
    thought = Thought(Rules.of(markers), [1, 2, 5])
    tokens = [1, 2, 2, 1, 2, 1, 7, 1, 2, 9, 9, 8, 8, 3, 3]
    assert [thought.takes(token) for token in tokens] == [
        *(True, True, True, True, True),
        # No token of a marker counts twice, and the first tokens of a start are no sign of it.
        *(False, False, False, True),
        *(True, True, True),
        *(False, True, True),
    ]
    thought = Thought(Rules.of(replace(markers, call_ends_thinking=False)), [3])
    assert all(thought.takes(token) for token in [9, 8, 5])


def chunks(tokens: Sequence[int], most: int, rng: random.Random) -> Iterator[list[int]]:
    at = 0
    while at < len(tokens):
        size = rng.randint(1, most)
        yield list(tokens[at : at + size])
        at += size


def expected(tokens: Sequence[int], opened: bool, stop: Sequence[str], include: bool, least: int) -> Any:
    """What must come out: tried at each end of each stop string, one character after the other."""
    texts = run([[token] for token in tokens], [], [], None, finish=None, skip_special_tokens=False).texts
    (start,), (end,) = ids("<think>"), ids("</think>")
    text, begin = "", 0
    for number, (token, new) in enumerate(zip(tokens, texts, strict=True), 1):
        is_open = opened
        opened = (opened or token == start) and token != end
        for shown in new:
            text += shown
            if is_open or opened or number <= least:
                continue
            for each in stop:
                if text[begin:].endswith(each):
                    return (text if include else text.removesuffix(each)), each, number
        if is_open or opened:
            begin = len(text)
    return text, None, len(tokens)


@pytest.mark.parametrize("seed", range(8))
def test_any_tokens_in_any_steps(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    words = [ids(text)[0] for text in ("a", "b", "b", ">", "<", " ")]
    markers = [*ids("<think>"), *ids("</think>")]
    found: list[str | None] = []
    for _ in range(60):
        tokens = [rng.choice(markers if rng.random() < 0.15 else words) for _ in range(rng.randint(1, 30))]
        stop = list({"".join(rng.choices("ab<> ", k=rng.randint(1, 3))) for _ in range(rng.randint(1, 3))})
        include, least, opened = rng.random() < 0.5, rng.choice((0, 0, 3, 9)), rng.random() < 0.5
        text, matched, count = expected(tokens, opened, stop, include, least)
        seen = run(
            list(chunks(tokens, rng.choice((1, 1, 4)), rng)),
            ids(THINKING if opened else PLAIN),
            stop,
            rules(),
            include_stop_str_in_output=include,
            min_tokens=least,
            skip_special_tokens=False,
        )
        assert (seen.text, seen.stop, seen.tokens) == (text, matched, tokens[:count]), (tokens, stop, include, least)
        assert seen.finish == ("length" if matched is None else "stop")
        found.append(matched)
    assert None in found
    assert len(set(found)) > 4


@pytest.mark.parametrize("include", [False, True])
def test_a_stream_holds_back_as_vllms_does(kind: str, include: bool) -> None:
    rng = random.Random(1)
    tokens = ids("a STOP über 日本 <b> b</think>c 語 d<think>e STOP f</think>g h")
    for steps in (*(list(chunks(tokens, most, rng)) for most in (1, 3)), [tokens]):
        for finish in (FinishReason.LENGTH, FinishReason.STOP):
            ours, stock = (
                run(steps, ids(THINKING), stop, follows, finish, include_stop_str_in_output=include, min_tokens=2)
                for stop, follows in ((["STOP"], rules()), ([NEVER * 4], None))
            )
            assert ours == stock


def test_without_thinking_it_is_vllms_own(kind: str) -> None:
    rng = random.Random(2)
    for _ in range(40):
        tokens = [ids(rng.choice("aab b"))[0] for _ in range(20)]
        stop = ["".join(rng.choices("ab ", k=rng.randint(1, 4))) for _ in range(2)]
        steps = list(chunks(tokens, 3, rng))
        fields: dict[str, Any] = {"include_stop_str_in_output": rng.random() < 0.5, "min_tokens": rng.choice((0, 5))}
        finish = rng.choice((FinishReason.LENGTH, FinishReason.STOP))
        ours, stock = (run(steps, ids(PLAIN), stop, follows, finish, **fields) for follows in (rules(), None))
        assert ours == stock


def test_only_requests_with_stop_strings_are_followed() -> None:
    processor = OutputProcessor(tokenizer(), log_stats=False)
    follow(processor, rules())
    processor.add_request(made("plain", [1], SamplingParams()), None)
    processor.add_request(made("stops", [1], SamplingParams(stop=["x"])), None)
    processor.add_request(made("session", [1], SamplingParams(stop=["x"]), resumable=True), None)
    kinds = {name: type(state.detokenizer).__name__ for name, state in processor.request_states.items()}
    assert kinds == {
        "plain": "FastIncrementalDetokenizer",
        "stops": "MeridianFastIncrementalDetokenizer",
        "session": "FastIncrementalDetokenizer",
    }


def test_the_front_ends_are_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for front_end in (AsyncLLM, LLMEngine):
        monkeypatch.setattr(front_end, "__init__", front_end.__init__)
    monkeypatch.setattr(stops, "configured", lambda: MeridianConfig(model=ModelConfig(stop_strings="answer")))
    stops.install()
    first = AsyncLLM.__init__, LLMEngine.__init__
    stops.install()
    assert (AsyncLLM.__init__, LLMEngine.__init__) == first
    assert all(hasattr(init, "meridian") for init in first)


def test_a_configuration_that_cannot_be_read_stops_no_plugin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "meridian.toml").write_text("[model]\nstop_strings = 5\n")
    monkeypatch.setenv("MERIDIAN_CONFIG", str(tmp_path / "meridian.toml"))
    logger = logging.getLogger("vllm")
    monkeypatch.setattr(logger, "propagate", True)
    plugin.install()
    assert "meridian: stop strings bind in thinking too: " in caplog.text
    assert not hasattr(LLMEngine.__init__, "meridian")


# The real engine, whose model says a script.

ENGINE = {
    "model": "",
    "logits_processors": ["outputs.scripted:Script"],
    "max_model_len": 1024,
    "enforce_eager": True,
    "dtype": "float32",
    "max_num_seqs": 8,
    "block_size": 32,
}
SAID = "a STOP b</think>c STOP d"

OFFLINE = """
import json, sys
options = json.loads(sys.argv[1])
from vllm import LLM, SamplingParams
from vllm.v1.engine import detokenizer
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine
llm = LLM(**options["engine"])
found = {"wrapped": [hasattr(kind.__init__, "meridian") for kind in (AsyncLLM, LLMEngine)]}
for kind in ("fast", "slow"):
    if kind == "slow":
        detokenizer.uses_fast_detokenizer = lambda tokenizer: False
    params = SamplingParams(max_tokens=40, n=2, stop=["STOP"], extra_args={"script": options["said"]})
    (done,) = llm.generate([options["prompt"]], params, use_tqdm=False)
    found[kind] = [[one.text, one.finish_reason, one.stop_reason] for one in done.outputs]
found["under_way"] = llm.llm_engine.has_unfinished_requests()
print(json.dumps(found))
"""

STREAMED = """
import asyncio, json, sys

async def main():
    options = json.loads(sys.argv[1])
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options["engine"]))
    params = SamplingParams(temperature=0.0, max_tokens=40, stop=["STOP"], extra_args={"script": options["said"]},
                            output_kind=RequestOutputKind.DELTA)
    texts = []
    async for output in engine.generate(options["prompt"], params, "a"):
        (choice,) = output.outputs
        texts.append(choice.text)
    print(json.dumps({"texts": texts, "finish": choice.finish_reason, "stop": choice.stop_reason}))
    engine.shutdown()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.fixture
def on_engine(tmp_path: Path) -> Callable[[str, str], dict[str, Any]]:
    """Runs a script with a `[model]` table; returns what it found."""

    def scripted(code: str, of_the_model: str) -> dict[str, Any]:
        config = tmp_path / "meridian.toml"
        config.write_text(f"[model]\n{of_the_model}[admin]\nlisten = ''\n[telemetry]\nprometheus = ''\n")
        env = {**os.environ, **ENVIRONMENT, "MERIDIAN_CONFIG": str(config)}
        env["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        given = {"engine": ENGINE | {"model": str(model_dir())}, "prompt": THINKING, "said": SAID}
        done = fresh.run(None, json.dumps(given), code=code, env=env)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return scripted


ScriptRun = Callable[[str, str], dict[str, Any]]


def test_the_engine_stops_in_the_answer(on_engine: ScriptRun) -> None:
    found = on_engine(OFFLINE, 'stop_strings = "answer"\n')
    assert found.pop("wrapped") == [True, True]
    assert found.pop("under_way") is False
    assert found == {kind: [["a STOP b</think>c ", "stop", "STOP"]] * 2 for kind in KINDS}


@pytest.mark.parametrize("of_the_model", ["", 'stop_strings = "everywhere"\n'])
def test_without_the_option_nothing_is_wrapped(on_engine: ScriptRun, of_the_model: str) -> None:
    found = on_engine(OFFLINE, of_the_model)
    assert found.pop("wrapped") == [False, False]
    assert found["fast"] == [["a ", "stop", "STOP"]] * 2


def test_a_stream_of_the_engine_stops_in_the_answer(on_engine: ScriptRun) -> None:
    found = on_engine(STREAMED, 'stop_strings = "answer"\n')
    assert "".join(found.pop("texts")) == "a STOP b</think>c "
    assert found == {"finish": "stop", "stop": "STOP"}
