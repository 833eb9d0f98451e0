"""The situations of the equality suite, as data.

A situation is a name, the engines in which it runs, and requests. `Ask` runs offline and, as `/v1/completions`, on a
server; `Post` is a request to the server; `Session` is a streaming-input session. All sampling is seeded by request,
but where the situation is about the seed of the engine.

vLLM 0.32 has no `best_of`, and its CPU worker ignores sleeping (`vllm/v1/worker/cpu_worker.py`), so "sleep and wake"
empties the prefix cache and pauses the scheduler only.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outputs import FOLLOWS

OFFLINE, OFFLINE_ASYNC, HTTP, HTTP_ASYNC = "offline", "offline async", "HTTP", "HTTP async"
WAYS = (OFFLINE, OFFLINE_ASYNC, HTTP, HTTP_ASYNC)
BOTH_OFFLINE, BOTH_HTTP = (OFFLINE, OFFLINE_ASYNC), (HTTP, HTTP_ASYNC)


@dataclass(frozen=True)
class Engine:
    """A model and vLLM's options. The options hold for all of its ways."""

    model: str = "thinks"
    options: dict[str, Any] = field(default_factory=dict)
    ways: tuple[str, ...] = BOTH_OFFLINE
    # vLLM refuses logits processors of others in an engine that speculates; Meridian's plug-in brings its own.
    has_script: bool = True
    has_processors: bool = True
    embeds: bool = False
    has_sessions: bool = False
    # While requests run, generation is paused and resumed again and again; for asked.py.
    pauses: bool = False
    serve_arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ask:
    """A request for a completion; `params` are the fields of `SamplingParams`, and the script."""

    prompt: str | Sequence[int] | dict[str, Any]
    params: dict[str, Any] = field(default_factory=dict)
    adapter: bool = False
    priority: int = 0


@dataclass(frozen=True)
class Post:
    """A request to the server."""

    path: str
    body: dict[str, Any] | str
    is_get: bool = False


@dataclass(frozen=True)
class Session:
    """Turns of a streaming-input session: text and parameters."""

    turns: tuple[tuple[str, dict[str, Any]], ...]


@dataclass(frozen=True)
class Situation:
    """A situation; `engines` are names of `ENGINES`, `ways` those in which it makes sense (all of the engine's)."""

    name: str
    group: str
    engines: tuple[str, ...]
    requests: tuple[Any, ...]
    ways: tuple[str, ...] = WAYS
    # Offline, requests of a situation arrive together, but for these.
    one_by_one: bool = False
    # Offline, the engine sleeps and wakes after each request.
    sleeps: bool = False

    @property
    def is_for_runner_v2(self) -> bool:
        """Whether it runs on Model Runner V2. A thousand tokens and more take minutes where kernels are interpreted."""
        asks = [x.params for x in self.requests if isinstance(x, Ask)]
        tokens = sum(x.get("max_tokens", 0) * x.get("n", 1) for x in asks)
        return tokens < 1000 and self.name not in NOT_ON_RUNNER_V2


# There stock vLLM 0.32 refuses the first with its stop tokens, and then does not end the second.
NOT_ON_RUNNER_V2 = ("drafts of an n-gram, with min_tokens and stop tokens", "drafts of an n-gram, with a grammar")

ENGINES = {
    # vLLM's own mode of log probabilities here is raw_logprobs.
    "plain": Engine(ways=WAYS),
    "parser": Engine(
        options={"reasoning_parser": "qwen3"},
        ways=WAYS,
        serve_arguments=("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details"),
    ),
    "in reasoning": Engine(
        options={"reasoning_parser": "qwen3", "structured_outputs_config": {"enable_in_reasoning": True}}
    ),
    "raw logits": Engine(options={"logprobs_mode": "raw_logits", "max_logprobs": -1}, ways=(OFFLINE,)),
    "processed logprobs": Engine(options={"logprobs_mode": "processed_logprobs", "max_logprobs": -1}),
    "processed logits": Engine(options={"logprobs_mode": "processed_logits"}, ways=(OFFLINE,)),
    # 40 blocks of 32 tokens, 64 tokens a step.
    "tight": Engine(options={"num_gpu_blocks_override": 40, "max_num_batched_tokens": 64, "max_model_len": 1024}),
    "priority": Engine(options={"num_gpu_blocks_override": 40, "max_model_len": 1024, "scheduling_policy": "priority"}),
    "speculation": Engine(
        options={
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
            "reasoning_parser": "qwen3",
        },
        ways=(OFFLINE,),
        has_script=False,
    ),
    "adapter": Engine(options={"enable_lora": True, "max_lora_rank": 8}),
    "long": Engine("long", {"max_model_len": 40_960, "max_num_seqs": 2, "max_num_batched_tokens": 8192}),
    "long thought": Engine("long", {"max_model_len": 40_960}, ways=(OFFLINE,)),
    "harmony": Engine("harmony", ways=BOTH_OFFLINE),
    "harmony parser": Engine("harmony", {"reasoning_parser": "openai_gptoss"}, ways=(OFFLINE,)),
    "no markers": Engine("no-markers", ways=BOTH_OFFLINE),
    "no tokenizer": Engine(options={"skip_tokenizer_init": True}, ways=(OFFLINE,)),
    "sessions": Engine(options={"reasoning_parser": "qwen3"}, has_sessions=True),
    "embeddings": Engine(
        options={"runner": "pooling"}, ways=(OFFLINE,), has_script=False, has_processors=False, embeds=True
    ),
    # All prompts in one step: on CPU, vLLM fails at a chunk of a prompt whose request has a seed of its own.
    "sampled": Engine(options={"max_num_seqs": 64, "max_num_batched_tokens": 8192}, ways=(OFFLINE,)),
    "encoder-decoder": Engine(
        "whisper",
        {"max_model_len": 448, "limit_mm_per_prompt": {"audio": 1}, "skip_mm_profiling": True},
        ways=(OFFLINE,),
    ),
}

TEXT = ("plain", "parser")
END, OTHER_END = "<|im_end|>", "<|endoftext|>"
ID = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<think>": 600, "</think>": 601}
USER = "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n"
THINKS = USER + "<think>\n"
ANSWERS = USER + "<think>\n\n</think>\n\n"
SAID = f"one two three</think>\n\nfour five six{END}"
HARMONY_USER = "<|start|>user<|message|>hello<|end|><|start|>assistant"
# The regular tokens of the alphabet of bytes.
LETTERS = list(range(35, 90))


def say(script: str, prompt: str = THINKS, **params: Any) -> Ask:
    """A request whose model says the script."""
    return Ask(prompt, {"script": script, **params})


def free(prompt: str | Sequence[int] = THINKS, seed: int = 1, **params: Any) -> Ask:
    """A request whose model says what its random weights say, sampled."""
    return Ask(prompt, {"temperature": 1.0, "seed": seed, **params})


def ids(count: int, seed: int) -> list[int]:
    """A prompt of so many tokens."""
    rng = random.Random(seed)
    return [rng.randrange(10, 600) for _ in range(count)]


FIRST = [
    # The only ones that depend on what the engine sampled before.
    Situation(
        "the engine's own seed", "seeds", TEXT, (Ask(THINKS, {"temperature": 1.0}), Ask(ANSWERS, {"temperature": 0.8}))
    ),
]

ENDINGS = [
    Situation(name, "endings", TEXT, requests)
    for name, requests in {
        "ends after its answer": (say(SAID),),
        "ends at the length in its answer": (say(SAID, max_tokens=12),),
        "ends at the length in thinking": (say(SAID, max_tokens=4),),
        "ends at the length on the end marker": tuple(say(SAID, max_tokens=n) for n in range(5, 14)),
        "ends without thinking": (say(f"four five six{END}", ANSWERS),),
        "the second end token is not an end": (say(f"one</think>\n\nfour{OTHER_END}five{END}"),),
        "ends with an empty answer": (say(f"one two</think>{END}"),),
        "ends with a blank answer": (say(f"one two</think>\n\n{END}"),),
        "thinks twice": (say(f"one</think>\n\ntwo<think>three</think>\n\nfour{END}"),),
        "opens thinking by itself": (say(f"<think>\none two</think>\n\nthree{END}", USER),),
        "opens thinking after some text": (say(f"zero<think>\none two</think>\n\nthree{END}", USER),),
        "ends thinking at its first token": (say(f"</think>\n\nthree{END}"),),
        "ends thinking that nothing opened": (say(f"one</think>two{END}", USER),),
        "thinks nothing at all": (say(f"one two{END}", USER),),
        "goes on with a started thought": (say(SAID, THINKS + "half a thought and"),),
        "many at once": tuple(say(SAID, max_tokens=n % 16 + 1) for n in range(40)),
        "goes round in circles": (
            say("a b " * 12, repetition_detection={"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3}),
        ),
    }.items()
]

EOS = [
    Situation(name, "EOS in thinking", TEXT, requests)
    for name, requests in {
        "EOS in thinking": (say(f"one two{END}three</think>\n\nfour{END}"),),
        "EOS as the first token": (say(f"{END}one</think>\n\ntwo{END}"),),
        "EOS in thinking, ignored": (say(f"one two{END}three</think>\n\nfour{END}", ignore_eos=True),),
        "EOS in thinking, sampled": tuple(say(f"one two{END}", temperature=0.8, seed=n) for n in range(4)),
        "EOS made likely": tuple(free(seed=n, logit_bias={ID[END]: 8.0}, max_tokens=64) for n in range(8)),
        "EOS in the second thought": (say(f"one</think>\n\ntwo<think>three{END}"),),
    }.items()
]

MASKS = [
    Situation(name, "masks", TEXT, requests)
    for name, requests in {
        "allowed_token_ids without the end marker": (
            say(SAID, allowed_token_ids=LETTERS),
            free(allowed_token_ids=LETTERS),
        ),
        "allowed_token_ids without EOS": (say(SAID, allowed_token_ids=[*LETTERS, ID["</think>"]]),),
        "allowed_token_ids with one token": (free(allowed_token_ids=[40], max_tokens=20),),
        "allowed_token_ids with EOS only": (free(allowed_token_ids=[ID[END]]),),
        "bad_words in the answer": (say(SAID, bad_words=["five", "four five"]), free(bad_words=["a", "e", "th"])),
        "bad_words with the end marker": (say(SAID, bad_words=["</think>"]),),
        "logit_bias against the end marker": (
            say(SAID, logit_bias={ID["</think>"]: -100.0}),
            free(logit_bias={50: 5.0}),
        ),
        "logit_bias for the end marker": (free(logit_bias={ID["</think>"]: 9.0}), say(SAID, logit_bias={40: 100.0})),
        "min_tokens past EOS in thinking": (say(f"one{END}two</think>\n\nthree{END}", min_tokens=12),),
        "min_tokens past EOS in the answer": (say(SAID, min_tokens=30),),
        "min_tokens with stop_token_ids": (say(SAID, min_tokens=10, stop_token_ids=[ID["</think>"]]),),
        "stop_token_ids at the end marker": (say(SAID, stop_token_ids=[ID["</think>"]]),),
        "stop_token_ids in thinking": (say(SAID, stop_token_ids=list(range(35, 600))), free(stop_token_ids=LETTERS)),
        "ignore_eos in the answer": (say(SAID, ignore_eos=True), free(ignore_eos=True)),
        "special tokens in the text": (say(SAID, skip_special_tokens=False, spaces_between_special_tokens=False),),
    }.items()
]

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 8}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
OBJECT = '{"a": 12, "b": "x"}'
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<tool_call>", "schema": SCHEMA, "end": "</tool_call>"}],
    "triggers": ["<tool_call>"],
}
FORMS = (
    ("a JSON schema", {"json": SCHEMA}, OBJECT),
    ("json_object", {"json_object": True}, OBJECT),
    ("a choice", {"choice": ["yes", "no", "perhaps"]}, "perhaps"),
    ("a regular expression", {"regex": "[a-f]{3,6}[0-9]{2}"}, "abcde42"),
    ("a grammar", {"grammar": 'root ::= "left" | "right" root'}, "right left"),
    ("a structural tag", {"structural_tag": json.dumps(TAG)}, f"so <tool_call>{OBJECT}</tool_call>"),
)
GRAMMARS = [
    Situation(
        name,
        "grammars",
        (*TEXT, "in reasoning"),
        (
            say(f"one two</think>\n\n{said}{END}", structured_outputs=how, max_tokens=64),
            say(f"{said}{END}", ANSWERS, structured_outputs=how, max_tokens=64),
            say(f"{said}{END}", structured_outputs=how, max_tokens=64),
            free(structured_outputs=how, max_tokens=40),
            free(ANSWERS, seed=2, structured_outputs=how, max_tokens=40),
        ),
    )
    for name, how, said in FORMS
]
GRAMMARS += [
    Situation(
        "a JSON schema with EOS in thinking",
        "grammars",
        (*TEXT, "in reasoning"),
        (say(f"one two{END}", structured_outputs={"json": SCHEMA}), say(END, structured_outputs={"json": SCHEMA})),
    ),
    Situation(
        "a JSON schema that the length cuts",
        "grammars",
        TEXT,
        tuple(
            say(f"one</think>{OBJECT}{END}", structured_outputs={"json": SCHEMA}, max_tokens=n) for n in (2, 4, 9, 14)
        ),
    ),
    Situation(
        "a grammar beside free requests",
        "grammars",
        TEXT,
        (say(SAID), say(f"one</think>{OBJECT}{END}", structured_outputs={"json": SCHEMA}), free(), say(SAID)),
    ),
]

# vLLM's own `thinking_token_budget`, met before, inside and after the thought or the object.
BUDGETS = [
    Situation(
        f"a budget and {name}",
        "budgets",
        ("parser",),
        tuple(
            request
            for budget in (0, 3, 7, 40)
            for request in (
                say(SAID, thinking_token_budget=budget, **mask),
                free(seed=budget, thinking_token_budget=budget, **mask),
                say(f"<think>{SAID}", USER, thinking_token_budget=budget, **mask),
            )
        ),
    )
    for name, mask in {
        "no mask": {},
        "allowed_token_ids without the end marker": {"allowed_token_ids": LETTERS},
        "bad_words with the end marker": {"bad_words": ["</think>"]},
        "bad_words with a word of the thought": {"bad_words": ["two"]},
        "a logit_bias of -100 of the end marker": {"logit_bias": {ID["</think>"]: -100.0}},
        "a logit_bias of -5 of the end marker": {"logit_bias": {ID["</think>"]: -5.0}},
        "stop_token_ids of the end marker, with min_tokens": {"stop_token_ids": [ID["</think>"]], "min_tokens": 12},
        "EOS ignored": {"ignore_eos": True},
    }.items()
]
BUDGETS += [
    Situation(
        f"a budget and {name}",
        "budgets",
        ("parser", "in reasoning"),
        tuple(
            request
            for budget in (0, 2, 5, 9, 60)
            for request in (
                say(f"one two three</think>\n\n{said}{END}", structured_outputs=how, thinking_token_budget=budget),
                say(f"{said}{END}", structured_outputs=how, thinking_token_budget=budget),
                free(seed=budget, structured_outputs=how, thinking_token_budget=budget, max_tokens=32),
                say(f"{said}{END}", ANSWERS, structured_outputs=how, thinking_token_budget=budget),
            )
        ),
        BOTH_OFFLINE,
    )
    for name, how, said in FORMS
]
CALLED = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
BUDGETS += [
    Situation(
        "a budget of several choices",
        "budgets",
        ("parser",),
        tuple(free(seed=n, n=3, thinking_token_budget=n) for n in (0, 4, 60)),
    ),
    Situation(
        "a budget that a tool call inside the thinking exceeds",
        "budgets",
        ("parser",),
        tuple(say(f"x{CALLED}{END}", thinking_token_budget=n, extra_args={FOLLOWS: 1}) for n in (2, 9, 20)),
        BOTH_OFFLINE,
    ),
]

STOPS = [
    Situation(name, "stop strings", TEXT, requests)
    for name, requests in {
        "a stop string in thinking": (
            say(SAID, stop=["two"]),
            say(SAID, stop=["two"], include_stop_str_in_output=True),
        ),
        "a stop string in the answer": (
            say(SAID, stop=["five"]),
            say(SAID, stop="five", include_stop_str_in_output=True),
        ),
        "a stop string in both": (say(f"one six</think>\n\nfour six{END}", stop=["six"]),),
        "a stop string across the end marker": (
            say(SAID, stop=["three</think>"]),
            say(SAID, stop=["</think>\n\nfour"]),
        ),
        "the end marker as stop string": (
            say(SAID, stop=["</think>"]),
            say(SAID, stop=["</think>"], include_stop_str_in_output=True),
        ),
        "a stop string before min_tokens": (say(SAID, stop=["two", "five"], min_tokens=8),),
        "many stop strings": (say(SAID, stop=["zero", "six", "five", "e f"]), free(stop=["a", "b", "c d"])),
        "a stop string with log probabilities": (say(SAID, stop=["five"], logprobs=2),),
    }.items()
]

SEVERAL = [
    Situation(
        "n = 3, sampled", "n", TEXT, (free(n=3), free(n=3, seed=2, logprobs=1), free(ANSWERS, n=3, temperature=0.3))
    ),
    Situation("n = 4 of a script", "n", TEXT, (say(SAID, n=4, temperature=0.5, seed=3),)),
    Situation("n = 8 that end at EOS", "n", TEXT, (free(n=8, logit_bias={ID[END]: 7.0}, max_tokens=64),)),
    Situation("n = 2 with a grammar", "n", TEXT, (free(ANSWERS, n=2, structured_outputs={"choice": ["yes", "no"]}),)),
]

SEEDS = [
    Situation(
        f"temperature {temperature}, 7,500 tokens",
        "seeds",
        ("plain",),
        tuple(free(seed=n, temperature=temperature, max_tokens=n, ignore_eos=n != 2500) for n in (2000, 2500, 3000)),
        BOTH_OFFLINE,
    )
    for temperature in (0.3, 0.7, 1.0)
]
SEEDS += [
    Situation("greedy, 1,000 tokens", "seeds", TEXT, (Ask(THINKS, {"max_tokens": 1000}),), BOTH_OFFLINE),
    Situation("one seed many times", "seeds", TEXT, tuple(free(seed=7, max_tokens=32) for _ in range(6))),
]

MODES = ("plain", "raw logits", "processed logprobs", "processed logits")
LOGPROBS = [
    Situation(f"{name}, {'raw logprobs' if mode == 'plain' else mode}", "logprobs", (mode,), requests)
    for mode in MODES
    for name, requests in {
        "logprobs of what is sampled": (
            free(logprobs=5),
            free(seed=2, logprobs=3, temperature=0.7, top_p=0.9, top_k=20),
        ),
        "logprobs of a script": (say(SAID, logprobs=3), say(SAID, logprobs=3, temperature=0.7, seed=4)),
        "logprobs with masks": (
            free(logprobs=3, allowed_token_ids=LETTERS),
            say(f"one{END}</think>two{END}", logprobs=2, min_tokens=8),
            free(logprobs=3, logit_bias={50: 3.0}, presence_penalty=1.0),
        ),
    }.items()
]
LOGPROBS += [
    Situation("logprobs of the sampled token only", "logprobs", TEXT, (say(SAID, logprobs=0), free(logprobs=0))),
    Situation(
        "all log probabilities",
        "logprobs",
        ("raw logits", "processed logprobs"),
        (Ask(THINKS, {"logprobs": -1, "max_tokens": 4}), free(logprobs=-1, top_k=9, max_tokens=4)),
    ),
    Situation("log probabilities of named tokens", "logprobs", TEXT, (free(logprob_token_ids=[40, 41, 601]),)),
    Situation("flat log probabilities", "logprobs", TEXT, (free(logprobs=2, flat_logprobs=True),), BOTH_OFFLINE),
    Situation(
        "log probabilities of the prompt",
        "logprobs",
        TEXT,
        (free(prompt_logprobs=2), say(SAID, prompt_logprobs=0, logprobs=1)),
    ),
]

SAMPLING = [
    Situation(name, "penalties" if "penalty" in name or "penalties" in name else "sampling", TEXT, requests)
    for name, requests in {
        "presence_penalty": (free(presence_penalty=1.5, max_tokens=128), say(SAID, presence_penalty=2.0)),
        "frequency_penalty": (free(frequency_penalty=1.5, max_tokens=128), Ask(THINKS, {"frequency_penalty": 1.0})),
        "repetition_penalty": (free(repetition_penalty=1.3, max_tokens=128), Ask(THINKS, {"repetition_penalty": 1.5})),
        "all penalties": (
            free(presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.1, max_tokens=128),
            say(SAID, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2),
        ),
        "top_k": (free(top_k=5, max_tokens=128), free(top_k=1)),
        "top_p": (free(top_p=0.8, max_tokens=128), free(top_p=0.1)),
        "min_p": (free(min_p=0.1, max_tokens=128), free(min_p=0.9)),
        "top_k, top_p and min_p": tuple(free(seed=n, top_k=30, top_p=0.9, min_p=0.02, max_tokens=64) for n in range(4)),
        "greedy beside sampled": (Ask(THINKS), free(), Ask(ANSWERS), free(temperature=0.3), say(SAID)),
        "temperatures beside each other": tuple(free(seed=n, temperature=n / 5) for n in range(1, 9)),
    }.items()
]

TURN = f"{END}\n<|im_start|>user\nand then<|im_end|>\n<|im_start|>assistant\n<think>\n"
TALK = {"script": SAID, "max_tokens": 24}
SESSIONS = [
    Situation("a session of two turns", "streaming input", ("sessions",), (Session(((THINKS, TALK), (TURN, TALK))),)),
    Situation(
        "a session with EOS in thinking",
        "streaming input",
        ("sessions",),
        (
            Session(((THINKS, TALK | {"script": f"one{END}"}), (TURN, TALK))),
            Session(((THINKS, TALK), (TURN, TALK | {"script": f"one{END}two"}))),
        ),
    ),
    Situation(
        "a sampled session of three turns",
        "streaming input",
        ("sessions",),
        (
            Session(
                tuple(
                    (text, {"temperature": 0.8, "seed": 5, "max_tokens": 20, "logprobs": 1})
                    for text in (THINKS, TURN, TURN)
                )
            ),
        ),
    ),
    Situation(
        "sessions beside each other",
        "streaming input",
        ("sessions",),
        tuple(Session(((THINKS, TALK | {"max_tokens": 8 + n}), (TURN, TALK))) for n in range(4)),
    ),
]

AGAIN = "again and again and again and again "
SPECULATION = [
    Situation(f"drafts of an n-gram, {name}", "speculation", ("speculation",), requests)
    for name, requests in {
        "greedy": (Ask(THINKS + AGAIN, {"max_tokens": 100}), Ask(THINKS + AGAIN, {"max_tokens": 60})),
        "sampled": tuple(free(THINKS + AGAIN, seed=n, temperature=0.4, max_tokens=60) for n in range(3)),
        "with penalties": (Ask(THINKS + AGAIN, {"presence_penalty": 0.5, "max_tokens": 60}),),
        "with stop strings": (Ask(THINKS + AGAIN, {"stop": ["a", "e", "in"], "max_tokens": 100}),),
        "with min_tokens and stop tokens": (
            Ask(THINKS + AGAIN, {"min_tokens": 20, "stop_token_ids": list(range(35, 300)), "max_tokens": 100}),
        ),
        "with a grammar": (
            Ask(ANSWERS + AGAIN, {"structured_outputs": {"regex": "(again and ){2,9}no"}, "max_tokens": 60}),
            Ask(THINKS + AGAIN, {"structured_outputs": {"json": SCHEMA}, "max_tokens": 60}),
        ),
        "with allowed tokens": (
            Ask(THINKS + AGAIN, {"allowed_token_ids": LETTERS[:6], "max_tokens": 80}),
            Ask(THINKS + AGAIN, {"bad_words": ["a"], "logprobs": 2, "max_tokens": 40}),
        ),
        "that end in thinking": (
            Ask(THINKS + AGAIN, {"allowed_token_ids": [40, 41, ID[END]], "temperature": 1.0, "seed": 1}),
        ),
    }.items()
]

ADAPTERS = [
    Situation("without the adapter", "LoRA", ("adapter",), (Ask(THINKS), free(), say(SAID))),
    Situation(
        "with an adapter", "LoRA", ("adapter",), (Ask(THINKS, adapter=True), Ask(THINKS, {"script": SAID}, True))
    ),
    Situation(
        "with and without an adapter", "LoRA", ("adapter",), (Ask(THINKS), Ask(THINKS, adapter=True), free(), say(SAID))
    ),
    Situation(
        "EOS in thinking with an adapter", "LoRA", ("adapter",), (Ask(THINKS, {"script": f"one{END}two"}, True),)
    ),
]

MANY = tuple(
    Ask(ids(20 + 37 * n % 200, n), {"temperature": 0.7, "seed": n, "max_tokens": 60 + 13 * n % 90}) for n in range(16)
)
# On CPU, vLLM fails at a chunk of a prompt whose request has a seed of its own: these are greedy.
GREEDY = tuple(Ask(x.prompt, {**x.params, "temperature": 0.0, "seed": None}) for x in MANY)
MEMORY = [
    Situation("preemption", "KV memory", ("tight",), GREEDY),
    Situation("chunked prefill", "KV memory", ("tight",), (*(Ask(ids(n, n)) for n in (700, 33, 500)), say(SAID))),
    Situation(
        "prefix cache hits",
        "KV memory",
        ("tight", *TEXT),
        (*(Ask(ids(320, 4)) for _ in range(3)), Ask(ids(320, 4)[:200] + ids(60, 5)), say(SAID), say(SAID)),
        BOTH_OFFLINE,
        one_by_one=True,
    ),
    Situation(
        "a prefix cache that is too small",
        "KV memory",
        ("tight",),
        tuple(Ask(ids(600, n % 3)) for n in range(7)),
        one_by_one=True,
    ),
    Situation(
        "preemption of scripts",
        "KV memory",
        ("tight",),
        tuple(say("word " * 90 + SAID, max_tokens=220) for _ in range(12)),
    ),
    Situation(
        "sleep and wake", "KV memory", TEXT, (free(ids(200, 6)), free(ids(200, 6)), say(SAID)), (OFFLINE,), True, True
    ),
    Situation(
        "priorities",
        "priority",
        ("priority",),
        tuple(Ask(ask.prompt, ask.params, priority=n * 7 % 5) for n, ask in enumerate(GREEDY)),
    ),
    Situation(
        "priorities of scripts",
        "priority",
        ("priority",),
        tuple(Ask(THINKS, {"script": "word " * 60 + SAID, "max_tokens": 200}, priority=12 - n) for n in range(12)),
    ),
    # The last: if it is preempted at another token, the engine may fail, for it has seeds.
    Situation("one priority, sampled", "priority", ("priority",), MANY),
]

MODELS = [
    Situation(
        "a prompt above 32,768 tokens",
        "long contexts",
        ("long",),
        (Ask(ids(33_500, 1), {"max_tokens": 12, "logprobs": 1}),),
        (OFFLINE,),
    ),
    Situation(
        "a thought above 32,768 tokens in the prompt",
        "long contexts",
        ("long",),
        (Ask([ID["<think>"], *ids(33_500, 1)], {"script": "word " * 4 + SAID, "max_tokens": 40}),),
        (OFFLINE,),
    ),
    Situation(
        "an answer that crosses 32,768 tokens",
        "long contexts",
        ("long",),
        (Ask([*ids(32_755, 2), ID["<think>"]], {"script": "word " * 9 + SAID, "max_tokens": 32}),),
    ),
    *(
        Situation(f"harmony: {name}", "gpt-oss", ("harmony", "harmony parser"), requests)
        for name, requests in {
            "analysis, then final": (
                say(
                    "<|channel|>analysis<|message|>one two<|end|><|start|>assistant"
                    "<|channel|>final<|message|>three<|return|>",
                    HARMONY_USER,
                ),
            ),
            "ends in analysis": (say("<|channel|>analysis<|message|>one two<|return|>", HARMONY_USER),),
            "a tool call after analysis": (
                say(
                    "<|channel|>analysis<|message|>one<|end|><|start|>assistant<|channel|>commentary to=functions.f"
                    '<|constrain|>json<|message|>{"a": 1}<|call|>',
                    HARMONY_USER,
                    max_tokens=96,
                ),
            ),
            "a JSON schema": (
                say(
                    f"<|channel|>final<|message|>{OBJECT}<|return|>", HARMONY_USER, structured_outputs={"json": SCHEMA}
                ),
                free(HARMONY_USER, structured_outputs={"json": SCHEMA}),
            ),
            "sampled": (free(HARMONY_USER), free(HARMONY_USER, seed=2, temperature=0.5, logprobs=2)),
            "special tokens in the text": (
                say("<|channel|>analysis<|message|>one<|end|>two<|return|>", HARMONY_USER, skip_special_tokens=False),
            ),
        }.items()
    ),
    Situation("no markers: a script", "other models", ("no markers",), (say(f"one two{END}", USER), say(SAID, USER))),
    Situation(
        "no markers: masks and a grammar",
        "other models",
        ("no markers",),
        (
            say(f"{OBJECT}{END}", USER, structured_outputs={"json": SCHEMA}),
            free(USER, allowed_token_ids=LETTERS),
            free(USER, min_tokens=20, logprobs=2),
        ),
    ),
    Situation(
        "no tokenizer",
        "other models",
        ("no tokenizer",),
        (
            Ask(ids(30, 1), {"temperature": 1.0, "seed": 1, "logprobs": 1}),
            Ask([*ids(30, 2), ID["<think>"]], {"script": [50, 51, ID[END], 52], "stop_token_ids": [ID[END]]}),
        ),
    ),
    Situation("embeddings", "pooling", ("embeddings",), (Ask(THINKS), Ask(ANSWERS), Ask(ids(300, 1)), Ask(USER))),
    *(
        Situation(f"a sound: {name}", "encoder-decoder", ("encoder-decoder",), requests)
        for name, requests in {
            "greedy": (Ask({"text": "<|startoftranscript|><|en|><|transcribe|>", "noise": 1}),),
            "sampled": (
                Ask({"text": "<|startoftranscript|><|en|><|transcribe|>", "noise": 2}, {"temperature": 1.0, "seed": 1}),
            ),
            "a script": (
                Ask(
                    {"text": "<|startoftranscript|><|en|><|transcribe|>", "noise": 3},
                    {"script": "one<think>two<|endoftext|>three"},
                ),
            ),
        }.items()
    ),
]

OFFLINE_ERRORS = [
    Situation(name, "errors", TEXT, requests)
    for name, requests in {
        "a prompt that is too long": (free(ids(5000, 1)),),
        "a prompt that fills the context": (Ask(ids(4096, 1)), Ask(ids(4090, 1))),
        "an empty prompt": (free([]), free("")),
        "ids outside the vocabulary": (
            free([5, 99_999]),
            free(allowed_token_ids=[99_999]),
            free(logit_bias={99_999: 1.0}),
        ),
        "no allowed tokens": (free(allowed_token_ids=[]),),
        "a temperature below zero": (free(temperature=-1.0),),
        "top_p above one": (free(top_p=1.5),),
        "n above one, greedy": (Ask(THINKS, {"n": 2}),),
        "min_tokens above max_tokens": (free(min_tokens=20, max_tokens=10),),
        "a grammar that is none": (
            free(structured_outputs={"regex": "(["}),
            free(structured_outputs={"grammar": "root = ???"}),
            free(structured_outputs={"json": '{"type": "nothing"}'}),
        ),
        "too many logprobs": (free(logprobs=500),),
        "a bad word that is empty": (free(bad_words=[""]),),
        "an empty stop string": (free(stop=[""]),),
        "extra arguments of others": (free(extra_args={"mine": 1, "other": "x"}),),
    }.items()
]
# One refused request would take the others of its batch with it.
OFFLINE_ERRORS = [Situation(x.name, x.group, x.engines, x.requests, x.ways, one_by_one=True) for x in OFFLINE_ERRORS]

TOOL_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": TOOL_PARAMETERS}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>'
MESSAGES = [{"role": "user", "content": "hello there"}]


def chat(script: str | None = SAID, **body: Any) -> tuple[Post, Post]:
    """A chat request, and the same one streamed."""
    common: dict[str, Any] = {"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": 80, **body}
    if script is not None:
        common["vllm_xargs"] = {"script": script, **common.get("vllm_xargs", {})}
    ask = Post("/v1/chat/completions", {**common, "return_token_ids": True})
    usage = {"include_usage": True, "continuous_usage_stats": True}
    return ask, Post(ask.path, {**ask.body, "stream": True, "stream_options": usage})  # type: ignore[dict-item]


def complete(script: str | None = SAID, **body: Any) -> tuple[Post, Post]:
    """A completion, and the same one streamed."""
    common: dict[str, Any] = {"model": "m", "prompt": THINKS, "temperature": 0, "max_tokens": 48, **body}
    if script is not None:
        common["vllm_xargs"] = {"script": script}
    return (
        Post("/v1/completions", common),
        Post("/v1/completions", {**common, "stream": True, "stream_options": {"include_usage": True}}),
    )


def respond(script: str = SAID, **body: Any) -> tuple[Post, Post]:
    """A request of `/v1/responses`, and the same one streamed."""
    common = {"model": "m", "input": "hello there", "temperature": 0, "max_output_tokens": 80, "store": False}
    common |= {"vllm_xargs": {"script": script}, **body}
    return Post("/v1/responses", common), Post("/v1/responses", {**common, "stream": True})


def message(script: str = SAID, **body: Any) -> tuple[Post, Post]:
    """A request of Anthropic's `/v1/messages`, and the same one streamed."""
    common = {"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": 80}
    common |= {"vllm_xargs": {"script": script}, **body}
    return Post("/v1/messages", common), Post("/v1/messages", {**common, "stream": True})


def is_json(name: str = "s") -> dict[str, Any]:
    """The response format of a schema."""
    return {"type": "json_schema", "json_schema": {"name": name, "schema": SCHEMA, "strict": True}}


THOUGHT = "one two</think>\n\n"
CHAT = [
    Situation(f"chat: {name}", group, TEXT, requests, BOTH_HTTP)
    for name, group, requests in (
        ("an answer", "chat", chat()),
        ("without thinking", "chat", chat(f"four{END}", chat_template_kwargs={"enable_thinking": False})),
        ("sampled", "chat", chat(None, temperature=0.8, seed=1, top_p=0.9)),
        ("cut in thinking", "chat", chat(max_tokens=3)),
        ("EOS in thinking", "EOS in thinking", chat(f"one two{END}three</think>four{END}")),
        ("an empty answer", "endings", chat(f"one two</think>{END}")),
        ("log probabilities", "logprobs", chat(logprobs=True, top_logprobs=3)),
        ("n = 3", "n", chat(None, n=3, temperature=0.9, seed=2)),
        ("stop strings", "stop strings", (*chat(stop=["two"]), *chat(stop=["five"], include_stop_str_in_output=True))),
        ("masks", "masks", (*chat(bad_words=["five"]), *chat(allowed_token_ids=LETTERS), *chat(min_tokens=30))),
        ("a logit bias", "masks", chat(logit_bias={"601": -100})),
        (
            "a started answer",
            "chat",
            chat(
                f" five{END}",
                messages=[*MESSAGES, {"role": "assistant", "content": "four"}],
                continue_final_message=True,
                add_generation_prompt=False,
            ),
        ),
        (
            "several turns",
            "chat",
            chat(
                messages=[
                    *MESSAGES,
                    {"role": "assistant", "content": "four", "reasoning": "one"},
                    {"role": "user", "content": "and then"},
                ]
            ),
        ),
        ("reasoning_effort", "chat", (*chat(reasoning_effort="low"), *chat(reasoning_effort="high"))),
        ("without its reasoning", "chat", chat(include_reasoning=False)),
        ("max_completion_tokens", "chat", chat(max_completion_tokens=9)),
        ("penalties", "penalties", chat(None, temperature=1, seed=3, presence_penalty=1, repetition_penalty=1.2)),
        ("response_format json_schema", "grammars", chat(f"{THOUGHT}{OBJECT}{END}", response_format=is_json())),
        ("response_format json_schema at once", "grammars", chat(f"{OBJECT}{END}", response_format=is_json())),
        (
            "response_format json_schema without thinking",
            "grammars",
            chat(f"{OBJECT}{END}", response_format=is_json(), chat_template_kwargs={"enable_thinking": False}),
        ),
        (
            "response_format json_object",
            "grammars",
            chat(f"{THOUGHT}{OBJECT}{END}", response_format={"type": "json_object"}),
        ),
        ("a choice", "grammars", chat(f"{THOUGHT}no{END}", structured_outputs={"choice": ["yes", "no"]})),
    )
]

TOOLS = [
    Situation(f"tools: {name}", "tools", ("parser",), requests, BOTH_HTTP)
    for name, requests in {
        "auto": chat(f"{THOUGHT}{CALL}{END}", tools=[TOOL], max_tokens=120),
        "auto, no call": chat(tools=[TOOL]),
        "auto, two calls": chat(f"{THOUGHT}{CALL}\n{CALL}{END}", tools=[TOOL], max_tokens=160),
        "auto, text before the call": chat(f"{THOUGHT}four {CALL}{END}", tools=[TOOL], max_tokens=120),
        "a call that ends the turn in thinking": chat(f"one {CALL}{END}", tools=[TOOL], max_tokens=120),
        "a call in thinking that goes on": chat(f"one {CALL} two</think>\n\nthree{END}", tools=[TOOL], max_tokens=120),
        "a call that the length cuts": chat(f"{THOUGHT}{CALL}{END}", tools=[TOOL], max_tokens=25),
        "required": chat(
            f'{THOUGHT}[{{"name": "weather", "parameters": {{"city": "x"}}}}]{END}',
            tools=[TOOL],
            tool_choice="required",
            max_tokens=120,
        ),
        "named": chat(
            f'{THOUGHT}{{"city": "x"}}{END}',
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "weather"}},
            max_tokens=120,
        ),
        "none": chat(f"{THOUGHT}{CALL}{END}", tools=[TOOL], tool_choice="none", max_tokens=120),
        "after a result": chat(
            tools=[TOOL],
            messages=[
                *MESSAGES,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "x"}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c", "content": "<tool_response>sun</tool_response>"},
            ],
        ),
    }.items()
]

FLAT_TOOL = {"type": "function", "name": "weather", "description": "d", "parameters": TOOL_PARAMETERS}
ANTHROPIC_TOOL = {"name": "weather", "description": "d", "input_schema": TOOL_PARAMETERS}
APIS = [
    Situation(f"{api}: {name}", api, engines, requests, BOTH_HTTP)
    for api, engines, name, requests in (
        ("completions", TEXT, "an answer", complete()),
        ("completions", TEXT, "echo", (complete(echo=True)[0], complete(echo=True, logprobs=2, max_tokens=4)[0])),
        ("completions", TEXT, "several prompts", complete(prompt=[THINKS, ANSWERS, USER])),
        ("completions", TEXT, "log probabilities", complete(logprobs=3)),
        ("completions", TEXT, "sampled", complete(None, temperature=0.7, seed=2, n=2)),
        ("completions", TEXT, "EOS in thinking", complete(f"one{END}two")),
        ("completions", TEXT, "a JSON schema", complete(f"{THOUGHT}{OBJECT}{END}", response_format=is_json())),
        (
            "completions",
            TEXT,
            "beam search",
            (complete(None, use_beam_search=True, n=3, temperature=0, max_tokens=8)[0],),
        ),
        ("responses", TEXT, "an answer", respond()),
        ("responses", TEXT, "EOS in thinking", respond(f"one{END}two")),
        ("responses", TEXT, "cut", respond(max_output_tokens=4)),
        (
            "responses",
            ("parser",),
            "a JSON schema",
            respond(
                f"{THOUGHT}{OBJECT}{END}",
                text={"format": {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}},
            ),
        ),
        (
            "responses",
            ("parser",),
            "a tool",
            respond(f"{THOUGHT}{CALL}{END}", tools=[FLAT_TOOL], max_output_tokens=120),
        ),
        ("responses", ("parser",), "effort", respond(reasoning={"effort": "low"})),
        ("messages", TEXT, "an answer", message()),
        ("messages", TEXT, "EOS in thinking", message(f"one{END}two")),
        ("messages", TEXT, "stop_sequences", message(stop_sequences=["five"])),
        ("messages", TEXT, "cut", message(max_tokens=4)),
        ("messages", ("parser",), "a tool", message(f"{THOUGHT}{CALL}{END}", tools=[ANTHROPIC_TOOL], max_tokens=120)),
        (
            "messages",
            ("parser",),
            "a tool in thinking",
            message(f"one {CALL}{END}", tools=[ANTHROPIC_TOOL], max_tokens=120),
        ),
        (
            "messages",
            TEXT,
            "counted tokens",
            (Post("/v1/messages/count_tokens", {"model": "m", "messages": MESSAGES}),),
        ),
    )
]
USAGE = [
    Situation(
        "usage of cached prompts",
        "usage",
        TEXT,
        tuple(chat(messages=[{"role": "user", "content": "hello there " * 30}])[i] for i in (0, 0, 1)),
        BOTH_HTTP,
    ),
    Situation(
        "routes and models",
        "usage",
        TEXT,
        (
            Post("/v1/models", {}, True),
            Post("/openapi.json", {}, True),
            Post("/tokenize", {"model": "m", "prompt": THINKS}),
            Post("/tokenize", {"model": "m", "messages": MESSAGES}),
            Post("/detokenize", {"model": "m", "tokens": [600, 50, 601]}),
            Post("/health", {}, True),
            Post("/version", {}, True),
        ),
        BOTH_HTTP,
    ),
]
ERRORS = [
    Situation(f"error: {name}", "errors", TEXT, requests, BOTH_HTTP)
    for name, requests in {
        "a chat that is too long": chat(messages=[{"role": "user", "content": "hello " * 5000}]),
        "max_tokens above the context": chat(max_tokens=99_999),
        "another model": chat(model="other"),
        "no messages": chat(messages=[]),
        "an unknown role": chat(messages=[{"role": "nobody", "content": "x"}]),
        "a body that is no JSON": (Post("/v1/chat/completions", "{"), Post("/v1/completions", "[]")),
        "an unknown route": (Post("/v1/nothing", {}), Post("/meridian/v1/status", {}, True)),
        "parameters outside their range": (
            *chat(temperature=-1),
            *chat(top_p=0),
            *chat(n=0),
            *chat(presence_penalty=9),
            *chat(top_logprobs=500, logprobs=True),
            *chat(min_tokens=-1),
            *chat(seed="x"),
        ),
        "a grammar that is none": (*chat(structured_outputs={"regex": "(["}), *chat(response_format={"type": "xml"})),
        "tools without a parser for them": chat(tools=[TOOL], tool_choice="auto"),
        "a tool that is not given": chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "other"}}),
        "a logit bias that is none": (*chat(logit_bias={"x": 1}), *chat(logit_bias={"99999": 1})),
        "a response that is not stored": (
            Post("/v1/responses/resp_none", {}, True),
            respond(previous_response_id="resp_x")[0],
        ),
        "messages without max_tokens": (Post("/v1/messages", {"model": "m", "messages": MESSAGES}),),
        "an extra argument of another": (*chat(vllm_xargs={"mine": 1}), *chat(nothing_known=True)),
    }.items()
]

SITUATIONS = (
    *FIRST,
    *ENDINGS,
    *EOS,
    *MASKS,
    *GRAMMARS,
    *BUDGETS,
    *STOPS,
    *SEVERAL,
    *SEEDS,
    *LOGPROBS,
    *SAMPLING,
    *SESSIONS,
    *SPECULATION,
    *ADAPTERS,
    *MEMORY,
    *MODELS,
    *OFFLINE_ERRORS,
    *CHAT,
    *TOOLS,
    *APIS,
    *USAGE,
    *ERRORS,
)
# These two take too long for the suite.
SAMPLED_ENGINE = "sampled"
SAMPLED = Situation(
    "200,000 sampled tokens",
    "sampled",
    (SAMPLED_ENGINE,),
    tuple(
        free(ids(20 + seed, seed), seed, temperature=(0.3, 0.7, 1.0)[seed % 3], max_tokens=2000, ignore_eos=True)
        for seed in range(100)
    ),
    (OFFLINE,),
)
THOUGHT_ENGINE = "long thought"
THOUGHT = Situation(
    "a thought of 33,000 tokens",
    "long contexts",
    (THOUGHT_ENGINE,),
    (free(max_tokens=33_000, ignore_eos=True, logit_bias={ID["</think>"]: -100.0}),),
    (OFFLINE,),
)
LONGER_ENGINES = (SAMPLED_ENGINE, THOUGHT_ENGINE)
EVERY = (*SITUATIONS, SAMPLED, THOUGHT)


# In `make test`: offline and over HTTP, both ways of scheduling, and what Meridian has code for.
CORE = frozenset(
    {
        ("parser", HTTP_ASYNC),
        ("parser", OFFLINE),
        ("plain", OFFLINE_ASYNC),
        ("in reasoning", OFFLINE),
        ("speculation", OFFLINE),
        ("tight", OFFLINE_ASYNC),
        ("adapter", OFFLINE),
        ("sessions", OFFLINE),
    }
)


def jobs() -> list[tuple[str, str]]:
    """Each engine and way in which some situation runs; those that take longest first."""
    found = [(name, way) for name, engine in ENGINES.items() for way in engine.ways if of(name, way)]
    return sorted(found, key=lambda job: -len(of(*job)))


def way_of_runner_v2(engine: str) -> tuple[str]:
    """The one way in which it runs there: as on a GPU, where it can."""
    return (OFFLINE_ASYNC,) if OFFLINE_ASYNC in ENGINES[engine].ways else (OFFLINE,)


def of(engine: str, way: str) -> list[Situation]:
    """The situations of an engine and a way, in their order.

    Of two engines with a server, one has a situation of `Ask` over HTTP and the other over HTTP async.
    """
    found = [x for x in EVERY if engine in x.engines and way in x.ways and way in ENGINES[engine].ways]
    if (engine, way) not in (("plain", HTTP_ASYNC), ("parser", HTTP)):
        return found
    return [x for x in found if not {"plain", "parser"} <= set(x.engines) or isinstance(x.requests[0], Post)]
