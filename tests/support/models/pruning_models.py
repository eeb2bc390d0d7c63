"""Models to prune, whose matrices are drawn widely, and a loss for them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, MarianConfig, MarianMTModel

from smelt.compress.factorize.svd import ErrorMetric, low_rank_layer
from smelt.models.edits import replace_module
from smelt.training.losses import token_loss


def marian_model() -> Any:
    """Return a translator of two and two layers."""
    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=48,
        max_position_embeddings=16,
        pad_token_id=63,
        decoder_start_token_id=63,
        eos_token_id=0,
        forced_eos_token_id=0,
        init_std=0.2,
    )
    return MarianMTModel(config).eval()


def bert_model() -> Any:
    """Return a classifier of two layers."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
        initializer_range=0.2,
    )
    return BertForSequenceClassification(config).eval()


def factorized_model() -> Any:
    """Return the translator with three layers as pairs of rank 9."""
    model = marian_model()
    for name in ("encoder.layers.0.fc1", "encoder.layers.0.fc2", "decoder.layers.1.encoder_attn.v_proj"):
        layer = model.get_submodule(f"model.{name}")
        replace_module(model, f"model.{name}", low_rank_layer(layer, 9, ErrorMetric())[0])
    return model


def example_batch(model: Any, rows: int = 3) -> dict[str, Any]:
    """Return inputs of 7 tokens, the last row shorter."""
    g = torch.Generator().manual_seed(5)
    batch = {"input_ids": torch.randint(1, 60, (rows, 7), generator=g)}
    batch["attention_mask"] = torch.tensor([[1] * 7, [1] * 7, [1, 1, 1, 1, 0, 0, 0]])[:rows]
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = torch.randint(1, 60, (rows, 5), generator=g)
    return batch


def example_loss(model: Any, batch: dict[str, Any]) -> Any:
    """Return the mean cross-entropy of labels that stand in a fixed order."""
    logits = model(**batch).logits
    labels = torch.arange(logits[..., 0].numel()).view(logits.shape[:-1]) % logits.shape[-1]
    return token_loss(logits, labels)
