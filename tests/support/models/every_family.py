"""A tiny model of any family with a working tokenizer, of as many layers as wanted; a stage run on it.

source = every_family.model_with_layers("t5", 3)
ctx = every_family.run_stage(Prune(), PruneSettings(), source, "t5", tmp_path / "out")
usability_checks.check_usable(ctx.out, "t5", tmp_path / "later")
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from smelt.data.splits import Columns
from smelt.data.tasks import Task
from smelt.models.families.registry import FAMILIES
from smelt.stage import Context
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.models import causal, classifiers, image_text, images, seq2seq, speech, tiny
from tests.support.pairs.matrix import is_full_matrix
from tests.support.shared_folders import make_once

TEXT_FAMILIES = {name: known for name, known in FAMILIES.items() if known.input_kind == "texts"}
"""The families that read texts."""
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
LABELS = ("no", "yes")


@dataclass(frozen=True)
class TinyFamily:
    """A family's tiny model.

    Args:
        layers: what its config calls the numbers of layers.
        maker: writes it into a folder, with other keys of its config; None: it is made from `config`.
        config: keys of its config.
        like: a family that computes in the same way. Of both, `DISTINCT_FAMILIES` has the other one alone.
    """

    layers: tuple[str, ...]
    maker: Callable[..., Path] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    like: str = ""


STACK, ENCODER_DECODER_LAYERS = ("num_hidden_layers",), ("encoder_layers", "decoder_layers")
OPT_CONFIG = {
    "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "dropout": 0.0,
}  # fmt: skip
MT5_CONFIG = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "dropout_rate": 0.0,
}  # fmt: skip
STARCODER2_CONFIG = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "sliding_window": 6,
}  # fmt: skip
MODELS: dict[str, TinyFamily] = {
    "marian": TinyFamily(ENCODER_DECODER_LAYERS, tiny.write_marian),
    "t5": TinyFamily(("num_layers", "num_decoder_layers"), partial(seq2seq.write_t5, gated=True)),
    "mt5": TinyFamily(("num_layers", "num_decoder_layers"), config=MT5_CONFIG, like="t5"),
    "bart": TinyFamily(ENCODER_DECODER_LAYERS, seq2seq.write_bart, like="marian"),
    "mbart": TinyFamily(ENCODER_DECODER_LAYERS, partial(seq2seq.write_bart, kind="mbart"), like="m2m_100"),
    "pegasus": TinyFamily(ENCODER_DECODER_LAYERS, config=TRANSLATOR_CONFIG, like="m2m_100"),
    "m2m_100": TinyFamily(ENCODER_DECODER_LAYERS,
        config=TRANSLATOR_CONFIG | {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0}),
    "bert": TinyFamily(STACK, tiny.write_bert),
    "distilbert": TinyFamily(("n_layers",), classifiers.distilbert, like="bert"),
    "roberta": TinyFamily(STACK, classifiers.roberta, like="bert"),
    "modernbert": TinyFamily(STACK,
        config=ENCODER_CONFIG | {"global_attn_every_n_layers": 2, "local_attention": 6}),
    "mpnet": TinyFamily(STACK, config=ENCODER_CONFIG | {"relative_attention_num_buckets": 32}),
    "xlm-roberta": TinyFamily(STACK, config=ENCODER_CONFIG | {"type_vocab_size": 1}, like="bert"),
    "albert": TinyFamily(STACK, config=ENCODER_CONFIG | {"embedding_size": 16}),
    "deberta-v2": TinyFamily(STACK, config=ENCODER_CONFIG | dict(FAMILIES["deberta-v2"].layout_config)),
    "electra": TinyFamily(STACK, config=ENCODER_CONFIG | {"embedding_size": 32}, like="bert"),
    "gpt2": TinyFamily(("n_layer",), partial(causal.write_model, family="gpt2", n_embd=64)),
    "opt": TinyFamily(STACK, config=OPT_CONFIG),
    "llama": TinyFamily(STACK, partial(causal.write_model, family="llama"), like="qwen3"),
    "qwen2": TinyFamily(STACK, partial(causal.write_model, family="qwen2"), like="qwen3"),
    "qwen3": TinyFamily(STACK, config=GATED_CONFIG),
    "mistral": TinyFamily(STACK, config=GATED_CONFIG | {"sliding_window": 6}, like="qwen3"),
    "mixtral": TinyFamily(STACK, config=GATED_CONFIG | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "gemma": TinyFamily(STACK,
        config=GATED_CONFIG | {"num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma3_text": TinyFamily(STACK, config=GATED_CONFIG | {"sliding_window": 6, "query_pre_attn_scalar": 20,
        "sliding_window_pattern": 2, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}}),
    "phi3": TinyFamily(STACK,
        config=GATED_CONFIG | {"sliding_window": None, "original_max_position_embeddings": 64}),
    "starcoder2": TinyFamily(STACK, config=STARCODER2_CONFIG),
    "granite": TinyFamily(STACK, config=GATED_CONFIG | {"embedding_multiplier": 3.0, "logits_scaling": 2.0,
        "residual_multiplier": 0.5, "attention_multiplier": 0.2, "tie_word_embeddings": True}),
    "gpt_neox": TinyFamily(STACK, config={"hidden_size": 64, "num_attention_heads": 2,
        "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 64, "rotary_pct": 0.5}),
    "phi": TinyFamily(STACK, config={"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96,
        "num_hidden_layers": 2, "max_position_embeddings": 64, "partial_rotary_factor": 0.5}),
    "smollm3": TinyFamily(STACK, config=GATED_CONFIG | {"no_rope_layer_interval": 2}, like="qwen3"),
    "vit": TinyFamily(STACK, images.write_model),
    "whisper": TinyFamily(ENCODER_DECODER_LAYERS, speech.write_whisper),
    "dinov2": TinyFamily(STACK, partial(images.write_model, family="dinov2")),
    "resnet": TinyFamily((), partial(images.write_model, family="resnet")),
    "convnext": TinyFamily((), partial(images.write_model, family="convnext")),
    "convnextv2": TinyFamily((), partial(images.write_model, family="convnextv2"), like="convnext"),
    "mobilenet_v2": TinyFamily((), partial(images.write_model, family="mobilenet_v2")),
    "efficientnet": TinyFamily((), partial(images.write_model, family="efficientnet")),
    "clip": TinyFamily(STACK, image_text.write_model),
    "siglip": TinyFamily(STACK, partial(image_text.write_model, family="siglip"), like="clip"),
}  # fmt: skip
"""The tiny model of each family: whoever tests every family takes it from here."""
CONFIGS = {name: model.config for name, model in MODELS.items() if model.config}
DISTINCT_FAMILIES = [name for name in TEXT_FAMILIES if is_full_matrix() or not MODELS[name].like]
"""One family for each way of computing, for tests of stages; all of them with SMELT_MATRIX=all."""
SEPARATE_BLOCKS = [
    name
    for name in DISTINCT_FAMILIES
    if not any(stack.repeats_block for stack in FAMILIES[name].stacks(CONFIGS.get(name, {})))
]
"""Those whose layers are blocks of their own, which can lose parts one by one."""


def make_model(folder: Path, family: str, **config: Any) -> Path:
    """Write the tiny model of any family with its tokenizer into `folder`; return it."""
    make = MODELS[family].maker
    return make(folder, **config) if make else write_model(folder, family, **config)


def model_with_layers(family: str, layers: int) -> Path:
    """Return a random model of any family with so many layers in each stack; read only."""
    config = dict.fromkeys(MODELS[family].layers, layers)
    return make_once(f"{family}-of-{layers}-layers", lambda folder: make_model(folder, family, **config))


def run_stage(stage: Any, settings: Any, source: Path, family: str, out: Path) -> Context:
    """Run a stage on `source` with rows of the family's first task; return its context."""
    task = FAMILIES[family].tasks[0]
    out.mkdir()
    if task == "language-modeling":
        file = causal.write_lines(out.with_suffix(".txt"), 2)
    else:
        file = (tiny.write_labeled if task == "text-classification" else tiny.write_pairs)(
            out.with_suffix(".jsonl")
        )
    return harness.run_stage(stage, settings, source, out, task, read_split(str(file), task, Columns(), out))


def write_model(folder: Path, family: str, task: Task | None = None, **config: Any) -> Path:
    """Write a random model of `family` with its tokenizer into `folder`; return it."""
    if config:
        return _write_model(folder, family, task, **config)
    model_folder = make_once(f"{family}-{task}", lambda new: _write_model(new, family, task))
    shutil.copytree(model_folder, folder, dirs_exist_ok=True)
    return folder


def _write_model(folder: Path, family: str, task: Task | None, **config: Any) -> Path:
    import torch

    from smelt.models.checkpoint import load_model, load_tokenizer, save_model
    from smelt.models.new_model import create_model

    model_family = FAMILIES[family]
    tokenizer_folder = folder / "tokenizer"
    tokenizer_folder.mkdir(parents=True)
    _write_tokenizer(tokenizer_folder, family)
    values = {"model_type": family} | CONFIGS[family] | config
    chosen = task or model_family.tasks[0]
    labels = LABELS if chosen == "text-classification" else ()
    create_model(values, tokenizer_folder, folder, task=chosen, seed=0, exact=True, labels=labels)
    shutil.rmtree(tokenizer_folder)
    model, edits = load_model(folder)
    torch.manual_seed(0)
    with torch.no_grad():  # widely; as they are drawn, every output is the same
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:
                parameter.normal_(0, 0.3)
        for name, parameter in model.named_parameters():
            if name.endswith(("out_proj.weight", "fc2.weight")):
                parameter.mul_(3)  # or the last token alone says what comes next
        if model_family.language_selection == "codes":  # or it says nothing but codes, which no text shows
            model.get_input_embeddings().weight[list(load_tokenizer(folder).all_special_ids)] *= 0.2
    random_folder = folder / "drawn"
    random_folder.mkdir()
    save_model(model, edits, random_folder, folder)
    shutil.copytree(random_folder, folder, dirs_exist_ok=True)
    shutil.rmtree(random_folder)
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
