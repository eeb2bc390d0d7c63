"""Tiny models of every family that smelt can start from a config, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smelt.models.new_model import create_model, train_tokenizer
from tests.support.models import tiny

SEQ2SEQ = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "encoder_ffn_dim": 32}
SEQ2SEQ |= {"decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
ENCODER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
CONFIGS = {
    "marian": ("translation", SEQ2SEQ | {"max_position_embeddings": 40}, "unigram"),
    "bart": ("summarization", SEQ2SEQ | {"max_position_embeddings": 40}, "bpe"),
    "t5": ("translation", {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}, "unigram"),
    "bert": ("text-classification", ENCODER, "wordpiece"),
    "distilbert": ("text-classification", {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32},
        "wordpiece"),
    "roberta": ("text-classification", ENCODER, "bpe"),
    "gpt2": ("language-modeling", {"n_embd": 16, "n_layer": 1, "n_head": 2}, "bpe"),
    "llama": ("language-modeling", ENCODER | {"num_key_value_heads": 1}, "bpe"),
    "qwen2": ("language-modeling", ENCODER | {"num_key_value_heads": 1}, "bpe"),
}  # fmt: skip
SIZES = {"bpe": 300, "unigram": 60, "wordpiece": 100}


def make_untrained(folder: Path, family: str, **more: Any) -> tuple[Path, list[str]]:
    """Write a model into `folder`/m, its tokenizer into `folder`/t; return the model and what was noted."""
    task, values, kind = CONFIGS[family]
    for name in ("t", "m"):
        (folder / name).mkdir(parents=True)
    train_tokenizer(
        tiny.SENTENCES, folder / "t", family=family, kind=kind, vocab_size=SIZES[kind], max_length=40
    )
    values = {"model_type": family, **values}
    arguments = {"task": task, "seed": 3, "exact": True} | more
    notes = create_model(values, folder / "t", folder / "m", **arguments)
    return folder / "m", notes
