"""The rule of where a pair is faster, against what was measured; and which layers get whole texts."""

import pytest

from smelt.compress.factorize.ranks import faster_below_rank, full_sequence_layers
from smelt.models.checkpoint import load_model
from tests.support.models import every_family

# outputs, inputs, share of the weights that a pair keeps, rows, its time in those of the whole matrix
# (docs/measurements/techniques.md)
MEASURED = [
    (256, 256, 0.25, 1, 1.17), (1024, 256, 0.6, 1, 1.16), (1024, 256, 0.25, 1, 0.94),
    (512, 512, 0.6, 1, 1.02), (512, 512, 0.4, 1, 0.85), (768, 768, 0.75, 1, 1.13), (768, 768, 0.6, 1, 0.92),
    (2048, 512, 0.9, 1, 1.07), (2048, 512, 0.75, 1, 0.96), (3072, 768, 0.9, 1, 1.09),
    (3072, 768, 0.6, 1, 0.80), (256, 256, 0.9, 32, 1.12), (256, 256, 0.6, 32, 0.80),
    (1024, 256, 0.9, 32, 1.03), (1024, 256, 0.75, 32, 0.89), (768, 768, 0.75, 32, 0.82),
]  # fmt: skip


@pytest.mark.parametrize(("outputs", "inputs", "share", "rows", "ratio"), MEASURED)
def test_rule_accepts_exactly_pairs_measured_faster(outputs, inputs, share, rows, ratio):
    rank = int(share * outputs * inputs / (outputs + inputs))
    assert (rank < faster_below_rank(outputs, inputs, full_sequence=rows > 1)) == (ratio < 1)


def test_latency_rank_limit_equals_formula_and_is_not_negative():
    assert faster_below_rank(512, 512, full_sequence=False) == pytest.approx(
        (0.9 * 512 * 512 - 100_000) / 1024
    )
    assert faster_below_rank(1024, 256, full_sequence=True) == pytest.approx(
        (0.9 * 1024 * 256 - 5_000) / 1280
    )
    assert faster_below_rank(256, 256, full_sequence=False) == 0
    assert faster_below_rank(8, 8, full_sequence=True) == 0


def test_encoder_and_cross_attention_keys_process_full_sequences():
    model, _ = load_model(every_family.model_with_layers("marian", 3))
    full_sequence = full_sequence_layers(model)
    encoder, decoder = "model.encoder.layers.0.", "model.decoder.layers.0."
    assert {
        encoder + name for name in ("self_attn.q_proj", "self_attn.out_proj", "fc1", "fc2")
    } <= full_sequence
    assert {name for name in full_sequence if name.startswith(decoder)} == {
        f"{decoder}encoder_attn.k_proj",
        f"{decoder}encoder_attn.v_proj",
    }


def test_language_model_layers_process_single_tokens():
    assert full_sequence_layers(load_model(every_family.model_with_layers("llama", 3))[0]) == set()
    assert len(full_sequence_layers(load_model(every_family.model_with_layers("bert", 3))[0])) == 3 * 6
