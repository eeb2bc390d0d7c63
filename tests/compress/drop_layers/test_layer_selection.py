"""Which layers a student copies, and what becomes of the edits."""

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, MarianConfig, MarianMTModel

from smelt.compress.drop_layers.layer_selection import keep_layers, layers_to_copy
from smelt.core.errors import InputError
from smelt.models.checkpoint import load_model
from smelt.models.edits import apply_edits
from tests.support.expected_errors import raises_code
from tests.support.models import every_family


def marian(decoder_layers=4):
    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=3,
        decoder_layers=decoder_layers,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=16,
        pad_token_id=63,
        decoder_start_token_id=63,
        eos_token_id=0,
        forced_eos_token_id=0,
    )
    return MarianMTModel(config).eval()


# LAYERS_TO_COPY of the examples to Shleifer & Rush 2020 (huggingface/transformers at 98ad48f,
# examples/research_projects/seq2seq-distillation/make_student.py), whole
PUBLISHED = {
    12: {1: [0], 2: [0, 6], 3: [0, 6, 11], 4: [0, 4, 8, 11], 6: [0, 2, 4, 7, 9, 11],
        9: [0, 1, 2, 4, 5, 7, 9, 10, 11], 12: list(range(12))},
    16: {1: [0], 2: [0, 15], 3: [0, 8, 15], 4: [0, 5, 10, 15], 6: [0, 3, 6, 9, 12, 15],
        8: [0, 2, 4, 6, 8, 10, 12, 15], 9: [0, 1, 3, 5, 7, 9, 11, 13, 15],
        12: [0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 15], 16: list(range(16))},
    6: {1: [0], 2: [0, 5], 3: [0, 2, 5], 4: [0, 1, 3, 5], 6: list(range(6))},
}  # fmt: skip


def test_uniform_layers_equal_published_table():
    for of, rows in PUBLISHED.items():
        assert {num_kept: layers_to_copy(num_kept, of) for num_kept in rows} == rows


def test_unlisted_counts_are_spread_evenly_from_first_to_last():
    assert layers_to_copy(5, 12) == [0, 3, 6, 8, 11]
    assert layers_to_copy(4, 24) == [0, 8, 15, 23]
    assert layers_to_copy(2, 3) == [0, 2]
    for layers in range(1, 40):
        for num_kept in range(1, layers + 1):
            selected = layers_to_copy(num_kept, layers)
            assert selected == sorted(set(selected))
            assert len(selected) == num_kept
            assert selected[0] == 0
            assert num_kept == 1 or selected[-1] == layers - 1 or (layers, num_kept) == (12, 2)


def test_first_and_last_layers_can_be_selected():
    assert layers_to_copy(2, 6, "first") == [0, 1]
    assert layers_to_copy(2, 6, "last") == [4, 5]
    with raises_code("more-than-model-has", InputError) as caught:
        keep_layers(marian(), [], "decoder_layers", 7, "uniform", stage="distill", prefix="student.")
    assert caught.value.setting == "student.decoder_layers"


def test_shortened_decoder_generates_same_tokens_with_cache():
    model = marian()
    kept_layers = [model.model.decoder.layers[i] for i in (0, 3)]
    _, kept_indices = keep_layers(
        model, [], "decoder_layers", 2, "uniform", stage="distill", prefix="student."
    )
    assert kept_indices == [0, 3]
    assert list(model.model.decoder.layers) == kept_layers
    assert model.config.decoder_layers == 2
    inputs = torch.tensor([[4, 5, 6, 0]])
    tokens = [
        model.generate(input_ids=inputs, max_new_tokens=6, num_beams=1, do_sample=False, use_cache=c)
        for c in (True, False)
    ]
    assert torch.equal(*tokens)


def test_edits_are_renumbered_with_their_layers():
    edits = [
        {"op": "low_rank", "module": "model.decoder.layers.1.fc1", "rank": 4},
        {"op": "low_rank", "module": "model.decoder.layers.2.fc1", "rank": 5},
        {"op": "set", "module": "model.encoder.layers.1.self_attn", "attribute": "num_heads", "value": 1},
    ]
    remaining_edits, _ = keep_layers(
        marian(), edits, "decoder_layers", [0, 2], "uniform", stage="distill", prefix="student."
    )
    assert remaining_edits == [{**edits[1], "module": "model.decoder.layers.1.fc1"}, edits[2]]


SHARED = "model.decoder.layers.{}.fc1"


def _share(module, other):
    return {"op": "share", "module": SHARED.format(module), "with": SHARED.format(other)}


def test_sharing_layer_becomes_owner_when_owner_is_removed():
    model = marian()
    edits = [
        # a size of its own, which the shared one then replaced
        {"op": "linear", "module": SHARED.format(2), "in_features": 32, "out_features": 8},
        {"op": "low_rank", "module": SHARED.format(0), "rank": 4},
        _share(1, 0),
        _share(2, 0),
        _share(3, 0),
        {"op": "linear", "module": f"{SHARED.format(0)}.up", "in_features": 4, "out_features": 24},
    ]
    apply_edits(model, edits)
    model.model.decoder.layers[1].fc2 = torch.nn.Linear(24, 32)
    remaining_edits, _ = keep_layers(
        model, edits, "decoder_layers", [2, 3], "uniform", stage="distill", prefix="student."
    )
    assert remaining_edits == [
        {"op": "low_rank", "module": SHARED.format(0), "rank": 4},
        _share(1, 0),
        {"op": "linear", "module": f"{SHARED.format(0)}.up", "in_features": 4, "out_features": 24},
    ]
    rebuilt = MarianMTModel(model.config)
    apply_edits(rebuilt, remaining_edits)
    assert rebuilt.get_submodule(SHARED.format(0)) is rebuilt.get_submodule(SHARED.format(1))
    shapes = [
        {n: p.shape for n, p in m.model.decoder.layers[0].fc1.named_parameters()} for m in (rebuilt, model)
    ]
    assert shapes[0] == shapes[1]


def test_share_chain_survives_removal_of_middle_layer():
    edits = [_share(3, 2), _share(2, 0), _share(3, 2)]
    remaining_edits, _ = keep_layers(
        marian(), edits, "decoder_layers", [0, 1, 3], "uniform", stage="distill", prefix="student."
    )
    assert remaining_edits == [_share(2, 0)]


def test_classifier_has_only_one_stack():
    config = BertConfig(
        vocab_size=16, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64
    )
    model = BertForSequenceClassification(config)
    with raises_code("unknown-stack", InputError) as caught:
        keep_layers(model, [], "decoder_layers", 1, "uniform", stage="distill", prefix="student.")
    assert caught.value.setting == "student.decoder_layers"
    keep_layers(model, [], "layers", 2, "uniform", stage="distill", prefix="student.")
    assert (len(model.bert.encoder.layer), model.config.num_hidden_layers) == (2, 2)


def test_first_layer_without_norm_must_be_kept():
    model, edits = load_model(every_family.model_with_layers("modernbert", 3))
    with raises_code("first-layer-required", InputError) as caught:
        keep_layers(model, edits, "layers", [1, 2], "uniform", stage="distill", prefix="student.")
    assert caught.value.setting == "student.layers"


@pytest.mark.parametrize("wrong", [[2, 1], [0, 4], [1, 1]])
def test_invalid_layer_lists_are_rejected(wrong):
    with raises_code("wrong-layer-numbers", InputError) as caught:
        keep_layers(marian(), [], "decoder_layers", wrong, "uniform", stage="distill", prefix="student.")
    assert caught.value.setting == "student.decoder_layers"
