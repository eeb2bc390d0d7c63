"""A tiny model of any family with a working tokenizer, of as many layers as wanted; a stage run on it.

source = every_family.of_layers("t5", 3)
ctx = every_family.run(Prune(), PruneSettings(), source, "t5", tmp_path / "out")
what_follows.check(ctx.out, "t5", tmp_path / "later")
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import causal
import classifiers
import harness
import seq2seq
import tiny
from shared_folders import make_once

from smelt.core.stage import Context
from smelt.data.examples import read_split
from smelt.data.splits import Columns, Task
from smelt.models.families.registry import FAMILIES

TEXT_FAMILIES = {name: known for name, known in FAMILIES.items() if known.input_kind == "texts"}
"""The families that these models are of; those of images are in images.py."""
ENCODER_DECODER_SIZES = {f"{side}_{word}": n for side in ("encoder", "decoder") for word, n in (
    ("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip
# a scaled embedding that is the head too lets every text end at once
TRANSLATOR_CONFIG = ENCODER_DECODER_SIZES | {
    "d_model": 32,
    "max_position_embeddings": 48,
    "dropout": 0.0,
    "scale_embedding": False,
}
GATED_CONFIG = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
ENCODER_CONFIG = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 34,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "pegasus": TRANSLATOR_CONFIG,
    "m2m_100": TRANSLATOR_CONFIG | {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0},
    "mistral": GATED_CONFIG | {"sliding_window": 6},
    "qwen3": GATED_CONFIG,
    "gemma": GATED_CONFIG | {"num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"},
    "phi3": GATED_CONFIG | {"sliding_window": None, "original_max_position_embeddings": 64},
    "opt": {
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "dropout": 0.0,
    },
    "modernbert": ENCODER_CONFIG | {"global_attn_every_n_layers": 2, "local_attention": 6},
    "mpnet": ENCODER_CONFIG | {"relative_attention_num_buckets": 32},
    "electra": ENCODER_CONFIG | {"embedding_size": 32},
}
LABELS = ("no", "yes")
ENCODER_DECODER_LAYERS = ("encoder_layers", "decoder_layers")
MAKERS: dict[str, tuple[Callable[..., Path], tuple[str, ...]]] = {
    "marian": (tiny.write_marian, ENCODER_DECODER_LAYERS),
    "t5": (partial(seq2seq.write_t5, gated=True), ("num_layers", "num_decoder_layers")),
    "bart": (seq2seq.write_bart, ENCODER_DECODER_LAYERS),
    "mbart": (partial(seq2seq.write_bart, kind="mbart"), ENCODER_DECODER_LAYERS),
    "bert": (tiny.write_bert, ("num_hidden_layers",)),
    "distilbert": (classifiers.distilbert, ("n_layers",)),
    "roberta": (classifiers.roberta, ("num_hidden_layers",)),
    "gpt2": (partial(causal.write_model, family="gpt2", n_embd=64), ("n_layer",)),
    "llama": (partial(causal.write_model, family="llama"), ("num_hidden_layers",)),
    "qwen2": (partial(causal.write_model, family="qwen2"), ("num_hidden_layers",)),
}
"""Families whose tiny models are written down elsewhere, and what their configs call the number of layers."""


def model_with_layers(family: str, layers: int) -> Path:
    """Return a random model of any family with so many layers in each stack; read only."""

    def make_it(folder: Path) -> None:
        if family in MAKERS:
            maker, words = MAKERS[family]
            maker(folder, **dict.fromkeys(words, layers))
        else:
            words = (
                ENCODER_DECODER_LAYERS
                if FAMILIES[family].architecture == "seq2seq"
                else ("num_hidden_layers",)
            )
            _write_model(folder, family, None, **dict.fromkeys(words, layers))

    return make_once(f"{family}-of-{layers}-layers", make_it)


def run_stage(stage: Any, settings: Any, source: Path, family: str, out: Path) -> Context:
    """Run a stage on `source` with rows of the family's first task; return its context."""
    task = FAMILIES[family].tasks[0]
    out.mkdir()
    if task == "language-modeling":
        file = causal.write_lines(out.with_suffix(".txt"), 2)
    else:
        file = (tiny.write_labelled if task == "text-classification" else tiny.write_pairs)(
            out.with_suffix(".jsonl")
        )
    return harness.run_stage(stage, settings, source, out, task, read_split(str(file), task, Columns(), out))


def write_model(folder: Path, family: str, task: Task | None = None, **config: Any) -> Path:
    """Write a random model of `family` with its tokenizer into `folder`; return it."""
    if config:
        return _write_model(folder, family, task, **config)
    made = make_once(f"{family}-{task}", lambda new: _write_model(new, family, task))
    shutil.copytree(made, folder, dirs_exist_ok=True)
    return folder


def _write_model(folder: Path, family: str, task: Task | None, **config: Any) -> Path:
    import torch

    from smelt.models.checkpoint import load_model, load_tokenizer, save_model
    from smelt.models.new_model import create_model

    known = FAMILIES[family]
    words = folder / "tokenizer"
    words.mkdir(parents=True)
    _write_tokenizer(words, family)
    values = {"model_type": family} | CONFIGS[family] | config
    chosen = task or known.tasks[0]
    labels = LABELS if chosen == "text-classification" else ()
    create_model(values, words, folder, task=chosen, seed=0, exact=True, labels=labels)
    shutil.rmtree(words)
    model, edits = load_model(folder)
    torch.manual_seed(0)
    with torch.no_grad():  # widely; as they are drawn, every output is the same
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:
                parameter.normal_(0, 0.3)
        for name, parameter in model.named_parameters():
            if name.endswith(("out_proj.weight", "fc2.weight")):
                parameter.mul_(3)  # or the last token alone says what comes next
        if known.language_selection == "codes":  # or it says nothing but codes, which no text shows
            model.get_input_embeddings().weight[list(load_tokenizer(folder).all_special_ids)] *= 0.2
    drawn = folder / "drawn"
    drawn.mkdir()
    save_model(model, edits, drawn, folder)
    shutil.copytree(drawn, folder, dirs_exist_ok=True)
    shutil.rmtree(drawn)
    return folder


def _write_tokenizer(folder: Path, family: str) -> None:
    from smelt.models.new_model import train_tokenizer

    form = FAMILIES[family].tokenizer_spec
    if form is None:
        _write_nllb_tokenizer(folder)
        return
    texts = [*tiny.SENTENCES, *causal.TEXT.splitlines(), seq2seq.PREFIX] * 3
    kind: Any = (
        "bpe"
        if "bpe" in form.allowed_models and FAMILIES[family].architecture == "decoder"
        else form.allowed_models[-1]
    )
    kind = "unigram" if FAMILIES[family].architecture == "seq2seq" else kind
    size = 320 if kind == "bpe" else 100
    train_tokenizer(texts, folder, family=family, kind=kind, vocab_size=size, max_length=40)


def _write_nllb_tokenizer(folder: Path) -> None:
    """Write a tokenizer of NLLB, which knows languages by their codes; its pieces are letters."""
    from transformers import NllbTokenizer

    letters = sorted({letter for sentence in tiny.SENTENCES for letter in sentence if letter != " "})
    vocabulary = {w: i for i, w in enumerate(["<s>", "<pad>", "</s>", "<unk>", "▁", *letters])}
    tokenizer = NllbTokenizer(
        vocab=vocabulary,
        merges=[],
        src_lang="eng_Latn",
        tgt_lang="deu_Latn",
        model_max_length=40,
        additional_special_tokens=["eng_Latn", "deu_Latn"],
    )
    tokenizer.save_pretrained(folder)
