"""Tiny decoder-only models with working byte-level tokenizers, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.shared_folders import written_once

TEXT = """The old house stands near the river.
A man in a red hat walks on the grass, and two dogs run behind him.
The cat sleeps in the sun; she sings a song. Zwei schöne Hunde laufen über die Straße.

In the morning the river is cold, and the man in the red hat sleeps in the old house.
"""
FAMILIES = ("gpt2", "llama", "qwen2")
_END = "<|endoftext|>"


def write_lines(path: Path, times: int = 6) -> Path:
    """Write plain text, some thousand bytes."""
    rows = [line for n in range(times) for line in [*TEXT.splitlines(), f"Number {n} is the next one."]]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def write_prompts(path: Path, rows: int = 8) -> Path:
    """Write prompts with their responses, which are all different."""
    tokens = TEXT.split()
    pairs = [
        {
            "prompt": f"What follows number {number}?",
            "response": f"{tokens[number % len(tokens)]} and {number}",
        }
        for number in range(rows)
    ]
    path.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs), encoding="utf-8")
    return path


def write_tokenizer(folder: Path, begin: bool = False) -> Any:
    """Write a byte-level BPE of 320 tokens; with `begin` it puts a first token before each text."""
    from tokenizers import ByteLevelBPETokenizer, processors
    from transformers import PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXT.splitlines(), vocab_size=320, special_tokens=[_END], show_progress=False)
    inner = trained._tokenizer
    if begin:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{_END} $A", pair=f"{_END} $A {_END} $B", special_tokens=[(_END, inner.token_to_id(_END))]
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=_END, eos_token=_END, model_max_length=64
    )
    wrapped.save_pretrained(folder)
    return wrapped


def write_metaspace_tokenizer(folder: Path) -> Any:
    """Write a BPE of 300 tokens that puts a space before each text, and a first token, as Llama 2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<s>", "</s>"]
    alphabet = [chr(code) for code in range(33, 127)]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(TEXT.splitlines(), trainer)
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>", model_max_length=64
    )
    wrapped.save_pretrained(folder)
    return wrapped


@written_once
def write_model(folder: Path, family: str, seed: int = 0, **config: Any) -> Path:
    """Write a random model of `family` with its tokenizer into `folder`; return it.

    Llama: 4 heads over 2 key-value heads, untied head, a first token before each text. Qwen2: the same
    heads, biases in query, key and value, tied head. GPT-2: 4 heads, tied head.
    """
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    trained_tokenizer = write_tokenizer(folder, begin=family == "llama")
    common = {"vocab_size": len(trained_tokenizer), "bos_token_id": 0, "eos_token_id": 0}
    gated = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    values: dict[str, dict[str, Any]] = {
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 64},
        "llama": {**gated, "tie_word_embeddings": False},
        "qwen2": {**gated, "tie_word_embeddings": True},
    }
    kinds = {
        "gpt2": ("GPT2", "GPT2LMHeadModel"),
        "llama": ("Llama", "LlamaForCausalLM"),
        "qwen2": ("Qwen2", "Qwen2ForCausalLM"),
    }
    config_name, class_name = kinds[family]
    model_config = getattr(transformers, f"{config_name}Config")(**(common | values[family] | config))
    torch.manual_seed(seed)
    model = getattr(transformers, class_name)(model_config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)  # random ones, so that a bias left out is noticed
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    return folder
