"""Small models with seeded random weights, made in the cache on first use.

All but the encoder-decoder are one Qwen3 of two layers; they differ in tokenizer, chat template and context.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 0
TRAINED_TOKENS = 600
# Of a made-up corpus, whose words the tokenizer merges.
WORDS, SENTENCES = 500, 300
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
HARMONY = (
    "<|endoftext|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|return|>",
    "<|call|>",
    "<|constrain|>",
)
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}"
    "{% for call in m['tool_calls'] or [] %}<tool_call>\n{{ call['function'] | tojson }}\n</tool_call>{% endfor %}"
    "{% if not (loop.last and continue_final_message) %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% endif %}"
)
PLAIN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HARMONY_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] or '' }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_DONE = ".complete"


@dataclass(frozen=True)
class Kind:
    """A tokenizer and a context; the weights follow from the size of the vocabulary."""

    special: tuple[str, ...] = CHATML
    markers: tuple[str, ...] = MARKERS
    template: str = TEMPLATE
    # Each ends a sequence; the first is the tokenizer's own.
    ends: tuple[str, ...] = ("<|im_end|>",)
    context_tokens: int = 4096


KINDS = {
    "thinks": Kind(),
    "long": Kind(context_tokens=40_960),
    "harmony": Kind(HARMONY, (), HARMONY_TEMPLATE, ("<|return|>", "<|call|>", "<|endoftext|>")),
    "no-markers": Kind(markers=(), template=PLAIN_TEMPLATE),
}
ADAPTER = "adapter"
WHISPER = "whisper"
NAMES = (*KINDS, ADAPTER, WHISPER)


def folder(name: str) -> Path:
    """The folder of a model, of the adapter for it, or of the encoder-decoder; its name changes with this script."""
    make: Callable[[Path], None] = {ADAPTER: _make_adapter, WHISPER: _make_whisper}.get(name) or _maker(KINDS[name])
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meridian"
    cache = Path(os.environ.get("MERIDIAN_CACHE") or default) / "models"
    made = cache / f"outputs-{name}-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]}"
    if (made / _DONE).exists():
        return made
    cache.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=made.name + ".", dir=cache))
    try:
        make(beside)
        (beside / _DONE).touch()
        beside.chmod(0o755)
        beside.rename(made)
    except OSError:
        if not (made / _DONE).exists():  # else another process was first, with the same bytes
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return made


def _maker(kind: Kind) -> Callable[[Path], None]:
    return lambda out: _make(out, kind)


def _trained(special: tuple[str, ...], markers: tuple[str, ...]) -> Any:
    """A byte-level BPE of made-up words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = random.Random(SEED)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(WORDS)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED_TOKENS,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([" ".join(rng.choices(words, k=20)) for _ in range(SENTENCES)], trainer)
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in markers])
    return bpe


def _make(out: Path, kind: Kind) -> None:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_trained(kind.special, kind.markers),
        eos_token=kind.ends[0],
        pad_token=kind.special[0],
        model_max_length=kind.context_tokens,
    )
    tokenizer.chat_template = kind.template
    tokenizer.save_pretrained(out)
    ids: dict[str, int] = tokenizer.get_vocab()
    last = max(ids.values())
    config = Qwen3Config(
        vocab_size=last // 64 * 64 + 64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=kind.context_tokens,
        tie_word_embeddings=False,
        # Narrow random weights decode greedily into one repeated token.
        initializer_range=0.3,
        eos_token_id=[ids[token] for token in kind.ends],
        pad_token_id=ids[kind.special[0]],
        bos_token_id=None,
    )
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():  # Markers and ids past the tokenizer: rare by chance.
        silent = [ids[token] for token in (*kind.special, *kind.markers)]
        model.lm_head.weight[[*silent, *range(last + 1, config.vocab_size)]] = 0
    if model.generation_config is not None:
        model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(out, safe_serialization=True)


def _make_adapter(out: Path) -> None:
    """A LoRA of rank 4 for the attention of the first layer, strong enough to change tokens."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(SEED + 1)
    rank, hidden, inner = 4, 64, 64
    name = "base_model.model.model.layers.0.self_attn"
    weights = {
        f"{name}.{part}_proj.lora_{side}.weight": torch.randn(shape)
        for part, width in (("q", inner), ("v", 32))
        for side, shape in (("A", (rank, hidden)), ("B", (width, rank)))
    }
    save_file(weights, out / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (out / "adapter_config.json").write_text(json.dumps(fields))


def _make_whisper(out: Path) -> None:
    """A Whisper of one layer a side, which hears 30 seconds of sound."""
    import torch
    from transformers import (
        PreTrainedTokenizerFast,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )

    special = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
    bpe = _trained(special, MARKERS)
    with tempfile.TemporaryDirectory() as folder:
        bpe.model.save(folder)
        trained = json.loads(bpe.to_str())
        vocab, merges = trained["model"]["vocab"], [tuple(pair) for pair in trained["model"]["merges"]]
    ids = {token: bpe.token_to_id(token) for token in (*special, *MARKERS)}
    tokenizer = WhisperTokenizer(
        vocab=vocab,
        merges=merges,
        unk_token=special[0],
        bos_token=special[0],
        eos_token=special[0],
        pad_token=special[0],
        additional_special_tokens=list(special[1:]),
    )
    extractor = WhisperFeatureExtractor(feature_size=80)
    WhisperProcessor(extractor, tokenizer).save_pretrained(out)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=special[0], pad_token=special[0]).save_pretrained(out)
    size = max(ids.values()) // 64 * 64 + 64
    config = WhisperConfig(
        vocab_size=size,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_target_positions=448,
        init_std=0.3,
        pad_token_id=ids[special[0]],
        bos_token_id=ids[special[0]],
        eos_token_id=ids[special[0]],
        decoder_start_token_id=ids[special[1]],
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(SEED)
    model = WhisperForConditionalGeneration(config)
    model.save_pretrained(out, safe_serialization=True)
