"""Mixtral: Mistral's attention and a mixture of experts. Source: transformers' modeling_mixtral.py.

Checkpoints store each expert's weights, gate, down and up, as w1, w2 and w3; names: conversion_mapping.py.
"""

from __future__ import annotations

from smelt.models.families.family import DECODER_TASKS, Family, PublishedLearningRate, TokenizerFiles
from smelt.models.families.llama import FAMILY as LLAMA
from smelt.models.families.llama import unsupported_config
from smelt.models.families.mistral import attention_window

_LAYERS = (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))

FAMILY = Family(
    name="mixtral",
    tasks=DECODER_TASKS,
    learning_rate=PublishedLearningRate(2e-5, 4096),  # as Llama's
    tokenizer_files=TokenizerFiles(("tokenizer.model",)),
    tokenizer_spec=LLAMA.tokenizer_spec,
    renamed_tensors=(
        (r"\.block_sparse_moe\.", ".mlp."),
        *((rf"(\.experts\.\d+)\.{stored}\.", rf"\1.{layer}.") for stored, layer in _LAYERS),
    ),
    published_tensors=(
        (r"\.mlp\.", ".block_sparse_moe."),
        *((rf"(\.experts\.\d+)\.{layer}\.", rf"\1.{stored}.") for stored, layer in _LAYERS),
    ),
    unused_tensors=LLAMA.unused_tensors,
    ties_output=lambda config: bool(config.get("tie_word_embeddings", False)),
    window=attention_window,
    unsupported_config=unsupported_config,
)
