"""Which layers a student copies, and what becomes of the edits."""

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, MarianConfig, MarianMTModel

from smelt.compress.distill.student import keep_layers, spread
from smelt.core.errors import InputError


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


@pytest.mark.parametrize(
    ("kept", "of", "layers"),
    [
        (6, 12, [0, 2, 4, 7, 9, 11]),  # the tables of Shleifer & Rush's code
        (3, 12, [0, 6, 11]),
        (3, 6, [0, 2, 5]),
        (1, 12, [0]),
        (12, 12, list(range(12))),
    ],
)
def test_spread_layers_are_the_published_ones(kept, of, layers):
    assert spread(kept, of) == layers


def test_ends():
    assert spread(2, 6, "first") == [0, 1]
    assert spread(2, 6, "last") == [4, 5]
    with pytest.raises(InputError, match="cannot have 7 of the source's 6 layers"):
        spread(7, 6)


def test_a_thinned_decoder_still_generates_with_its_cache():
    model = marian()
    kept_layers = [model.model.decoder.layers[i] for i in (0, 3)]
    _, kept = keep_layers(model, [], "decoder_layers", 2, "spread")
    assert kept == [0, 3]
    assert list(model.model.decoder.layers) == kept_layers
    assert model.config.decoder_layers == 2
    inputs = torch.tensor([[4, 5, 6, 0]])
    tokens = [
        model.generate(input_ids=inputs, max_new_tokens=6, num_beams=1, do_sample=False, use_cache=c)
        for c in (True, False)
    ]
    assert torch.equal(*tokens)


def test_edits_follow_their_layers():
    edits = [
        {"op": "low_rank", "module": "model.decoder.layers.1.fc1", "rank": 4},
        {"op": "low_rank", "module": "model.decoder.layers.2.fc1", "rank": 5},
        {"op": "set", "module": "model.encoder.layers.1.self_attn", "attribute": "num_heads", "value": 1},
    ]
    left, _ = keep_layers(marian(), edits, "decoder_layers", [0, 2], "spread")
    assert left == [{**edits[1], "module": "model.decoder.layers.1.fc1"}, edits[2]]


def test_classifiers_have_one_stack():
    config = BertConfig(
        vocab_size=16, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64
    )
    model = BertForSequenceClassification(config)
    with pytest.raises(InputError, match="a bert student has layers, not 'decoder_layers'"):
        keep_layers(model, [], "decoder_layers", 1, "spread")
    keep_layers(model, [], "layers", 2, "spread")
    assert (len(model.bert.encoder.layer), model.config.num_hidden_layers) == (2, 2)


@pytest.mark.parametrize("wrong", [[2, 1], [0, 4], [1, 1]])
def test_impossible_layers_are_refused(wrong):
    with pytest.raises(InputError, match="must be rising numbers from 0 to 3"):
        keep_layers(marian(), [], "decoder_layers", wrong, "spread")
