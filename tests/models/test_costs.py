"""Operations are those that torch counts; batches are those that the training makes."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from smelt.models.costs import Batch, SampleLengths, Work, activation_bytes, block_flops, forward_work
from smelt.models.model_size import read_model_size, size_from_config
from smelt.tasks.samples import EncodedSample
from smelt.training.samples import group_by_length
from tests.support.models import every_family

LLAMA_1B = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip


def test_one_token_costs_two_flops_per_weight():
    size = size_from_config(LLAMA_1B)
    attention, feed_forward = 2 * 2048 * 2048 + 2 * 2048 * 256, 3 * 2048 * 5632
    assert size.block_weights == 22 * (attention + feed_forward)
    assert block_flops(size, 1, 0, (0, 0)) == 2 * 22 * (attention + feed_forward)
    assert size.parameters == size.block_weights + 2 * 32000 * 2048


@pytest.mark.parametrize("family", ["llama", "marian"])
def test_forward_flops_equal_torch_counter(family):
    folder = every_family.model_with_layers(family, 2)
    kind = transformers.LlamaForCausalLM if family == "llama" else transformers.MarianMTModel
    model = kind.from_pretrained(folder, attn_implementation="eager")
    ids = torch.ones(3, 8, dtype=torch.int64)
    inputs = {"input_ids": ids} | ({} if family == "llama" else {"decoder_input_ids": ids})
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(**inputs)
    size = read_model_size(folder, json.loads((folder / "config.json").read_text()))
    work = forward_work(size, Batch(3, 8, 0 if family == "llama" else 8), "translation")
    flops = sum(amount for (unit, _), amount in work.amounts.items() if unit in ("forward", "matrix"))
    assert flops == pytest.approx(counted.get_total_flops(), rel=0.01)


@pytest.mark.parametrize(("size", "tokens"), [(4, None), (4, 60)])
def test_estimated_batches_equal_training_batches(size, tokens):
    pairs = [(3 + 7 * n % 11, 2 + 5 * n % 7) for n in range(30)]
    samples = [EncodedSample([0] * a, None, [0] * b) for a, b in pairs]
    expected = [
        (len(group), *(max(samples[i].token_counts[side] for i in group) for side in (0, 1)))
        for group in group_by_length(samples, size, tokens, None)
    ]
    lengths = SampleLengths(*map(tuple, zip(*pairs, strict=True)), count=30)
    estimated = [(batch.samples, batch.source, batch.target) for batch in lengths.batches(size, tokens)]
    assert Counter(estimated) == Counter(expected)


def test_checkpointing_lowers_activation_bytes_and_work_is_serializable():
    size, batch = size_from_config(LLAMA_1B), Batch(4, 128, 0)
    full_bytes, checkpointed_bytes = (
        activation_bytes(size, batch, False),
        activation_bytes(size, batch, False, True),
    )
    assert 0 < checkpointed_bytes < full_bytes / 3
    work = forward_work(size, batch, "language-modeling") * 2 + Work.of("seconds", 3)
    assert Work.from_json(json.loads(json.dumps(work.to_json()))) == work
