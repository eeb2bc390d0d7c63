"""A tiny model of every family with a working tokenizer, made from a config, once for all tests."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import causal
import seq2seq
import tiny

from smelt.core.data import Task
from smelt.families.registry import FAMILIES

SIDES = {f"{side}_{word}": n for side in ("encoder", "decoder") for word, n in (
    ("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip
# a scaled embedding that is the head too lets every text end at once
TRANSLATOR = SIDES | {"d_model": 32, "max_position_embeddings": 48, "dropout": 0.0, "scale_embedding": False}
GATED = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
ENCODER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 34,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "pegasus": TRANSLATOR,
    "m2m_100": TRANSLATOR | {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0},
    "mistral": GATED | {"sliding_window": 6},
    "qwen3": GATED,
    "gemma": GATED | {"num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"},
    "phi3": GATED | {"sliding_window": None, "original_max_position_embeddings": 64},
    "modernbert": ENCODER | {"global_attn_every_n_layers": 2, "local_attention": 6},
    "mpnet": ENCODER | {"relative_attention_num_buckets": 32},
}
LABELS = ("no", "yes")


def make(folder: Path, family: str, task: Task | None = None, **config: Any) -> Path:
    """Write a random model of `family` with its tokenizer into `folder`; return it."""
    if config:
        return _make(folder, family, task, **config)
    shutil.copytree(_once(family, task), folder, dirs_exist_ok=True)
    return folder


@functools.cache
def _once(family: str, task: Task | None) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"smelt-{family}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return _make(folder, family, task)


def _make(folder: Path, family: str, task: Task | None, **config: Any) -> Path:
    import torch

    from smelt.runtime.models.checkpoint import load_model, load_tokenizer, save_model
    from smelt.runtime.models.new_model import make_model

    known = FAMILIES[family]
    words = folder / "tokenizer"
    words.mkdir(parents=True)
    _tokenizer(words, family)
    values = {"model_type": family} | CONFIGS[family] | config
    chosen = task or known.tasks[0]
    labels = LABELS if chosen == "text-classification" else ()
    make_model(values, words, folder, task=chosen, seed=0, exact=True, labels=labels)
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
        if known.languages == "codes":  # or it says nothing but codes, which no text shows
            model.get_input_embeddings().weight[list(load_tokenizer(folder).all_special_ids)] *= 0.2
    drawn = folder / "drawn"
    drawn.mkdir()
    save_model(model, edits, drawn, folder)
    shutil.copytree(drawn, folder, dirs_exist_ok=True)
    shutil.rmtree(drawn)
    return folder


def _tokenizer(folder: Path, family: str) -> None:
    from smelt.runtime.text.new_tokenizer import train_tokenizer

    form = FAMILIES[family].new_tokenizer
    if form is None:
        _nllb_tokenizer(folder)
        return
    texts = [*tiny.SENTENCES, *causal.TEXT.splitlines(), seq2seq.PREFIX] * 3
    kind: Any = "bpe" if "bpe" in form.kinds and FAMILIES[family].kind == "decoder" else form.kinds[-1]
    kind = "unigram" if FAMILIES[family].kind == "seq2seq" else kind
    size = 320 if kind == "bpe" else 100
    train_tokenizer(texts, folder, family=family, kind=kind, vocab_size=size, max_length=40)


def _nllb_tokenizer(folder: Path) -> None:
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
