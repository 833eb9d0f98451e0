#!/usr/bin/env python3
"""Make a seeded random Qwen3 model with a trained tokenizer: ``make.py OUT``.

Needs torch, transformers and tokenizers, which every vLLM environment has. Idempotent: a complete OUT is left as it
is. The model is built beside OUT and renamed into place, so a reader never sees half of it.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

VOCAB_SIZE = 2048
TRAINED_TOKENS = 2040
SEED = 0
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK = ("<think>", "</think>")
DONE = ".complete"

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def _make_tokenizer(out: Path) -> dict[str, int]:
    """Train a byte-level BPE on made-up words; returns the ids of the markers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(SEED)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(4000)]
    corpus = [" ".join(rng.choices(words, k=20)) for _ in range(2000)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED_TOKENS,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    bpe.add_tokens([AddedToken(t, special=False, normalized=False) for t in THINK])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=8192
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return {t: vocabulary[t] for t in (*SPECIAL, *THINK)}


def _make_model(out: Path, ids: dict[str, int]) -> int:
    """Save seeded random weights; returns the number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    # Untied, with a wide initialisation: tied or narrow random weights decode greedily into one repeated token, and a
    # comparison of two outputs would then prove nothing. vLLM's CPU attention rejects a head_dim of 16.
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        initializer_range=0.3,
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
        bos_token_id=None,
    )
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)  # type: ignore[arg-type]
    # A marker that came up by chance would end thinking early. A zero row has logit 0, far below the largest of two
    # thousand random ones, so only a scheduler or a budget ends a phase. Ids past the tokenizer are silenced too.
    silent = [*ids.values(), *range(max(ids.values()) + 1, VOCAB_SIZE)]
    with torch.no_grad():
        model.lm_head.weight[silent] = 0
    logging.disable_progress_bar()
    model.save_pretrained(out, safe_serialization=True)
    return sum(p.numel() for p in model.parameters())


def make(out: Path) -> bool:
    """Make the model at ``out``; returns False when it was there already."""
    if (out / DONE).exists():
        return False
    out.parent.mkdir(parents=True, exist_ok=True)
    tmp = Path(tempfile.mkdtemp(prefix=out.name + ".", dir=out.parent))
    try:
        parameters = _make_model(tmp, _make_tokenizer(tmp))
        (tmp / DONE).write_text(f"{parameters} parameters\n")
        tmp.chmod(0o755)
        if out.exists():
            shutil.rmtree(out)
        os.rename(tmp, out)
    except OSError:
        if not (out / DONE).exists():  # else another process won the race, with the same bytes
            raise
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return True


def main() -> int:
    """Command line; exit code 2 on a wrong call."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: make.py OUT", file=sys.stderr)
        return 2
    out = Path(sys.argv[1])
    print(f"{out}: {'made' if make(out) else 'already there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
