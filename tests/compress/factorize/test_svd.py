"""Factorization against Eckart and Young, and the rule of where it saves."""

import json

import harness
import pytest
import tiny
import torch
from pydantic import ValidationError
from torch import nn
from transformers import MarianConfig, MarianMTModel

from smelt.compress.factorize.svd import Factorize, FactorizeSettings, choose_rank, factorize_layer
from smelt.core.artifact import Artifact, Manifest
from smelt.core.errors import InputError
from smelt.runtime.layers.low_rank import LowRankLinear
from smelt.runtime.models.checkpoint import load_model


@pytest.fixture
def layer():
    torch.manual_seed(2)
    return nn.Linear(40, 24)


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=16,
        pad_token_id=63,
        decoder_start_token_id=63,
        eos_token_id=0,
        forced_eos_token_id=0,
    )
    MarianMTModel(config).save_pretrained(tmp_path / "model")
    manifest = Manifest(
        key="0" * 64,
        format="torch",
        task="translation",
        stage="model",
        settings={},
        seed=0,
        parent=None,
        versions={},
    )
    return Artifact(tmp_path / "model", manifest)


def context(tmp_path):
    out = tmp_path / "out"
    return harness.context(out, seed=1)


def test_the_error_is_the_root_of_the_dropped_squares(layer):
    layer.requires_grad_(False)
    pair, rank, error = factorize_layer(layer, FactorizeSettings(rank=6))
    pair.requires_grad_(False)
    sigma = torch.linalg.svdvals(layer.weight.double())
    product = pair.up.weight.double() @ pair.down.weight.double()
    lost = (layer.weight.double() - product).norm()
    assert rank == pair.rank == 6
    torch.testing.assert_close(lost, sigma[6:].square().sum().sqrt(), rtol=1e-5, atol=0)
    assert error == pytest.approx(float(lost / layer.weight.double().norm()), rel=1e-5)


def test_the_pair_computes_the_product_and_keeps_the_bias(layer):
    torch.nn.init.zeros_(layer.weight)
    layer.weight.data += torch.outer(torch.arange(24.0), torch.arange(40.0))  # rank 1: nothing is lost
    pair, rank, error = factorize_layer(layer, FactorizeSettings(energy=0.999))
    x = torch.randn(3, 5, 40)
    assert rank == 1
    assert error < 1e-6
    torch.testing.assert_close(pair(x), layer(x), rtol=1e-4, atol=1e-3)


def test_the_rank_is_the_smallest_that_holds_the_energy():
    sigma = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64)  # squares 16, 9, 4, 1 of 30
    for energy, rank in ((0.5, 1), (0.54, 2), (0.83, 2), (0.84, 3), (0.96, 3), (0.97, 4), (1.0, 4)):
        assert choose_rank(sigma, 4, 4, FactorizeSettings(energy=energy)) == rank
    assert choose_rank(sigma, 40, 24, FactorizeSettings(ratio=0.5)) == 7  # 0.5 * 960 / 64 = 7.5


def test_a_layer_is_left_alone_where_the_rank_saves_nothing(layer):
    # 24 * 40 / 64 = 15: rank 14 saves, rank 15 costs the same
    assert factorize_layer(layer, FactorizeSettings(rank=14))[0] is not None
    assert factorize_layer(layer, FactorizeSettings(rank=15))[0] is None


def test_the_stage_factorizes_what_gains_and_names_the_rest(source, tmp_path):
    ctx = context(tmp_path)
    Factorize()(source, FactorizeSettings(rank=18, aim="size", exclude=["lm_head", "model.decoder.*"]), ctx)
    # 32 x 32 breaks even at 16, 64 x 32 at 21.3
    chosen = {f"model.encoder.layers.{i}.{n}" for i in (0, 1) for n in ("fc1", "fc2")}
    assert ctx.facts["ranks"] == dict.fromkeys(chosen, 18)
    assert "rank 18 of 32 x 32" in ctx.facts["left_alone"]["model.encoder.layers.0.self_attn.q_proj"]
    assert ctx.facts["parameters_before"] - ctx.facts["parameters_after"] == 4 * (64 * 32 - 18 * 96)
    assert ctx.warnings == []
    model, edits = load_model(ctx.out)
    assert {e["module"] for e in edits} == chosen
    original, _ = load_model(source.path)
    x = torch.randn(2, 32)
    fc1 = model.model.encoder.layers[0].fc1
    assert isinstance(fc1, LowRankLinear)
    u, s, vt = torch.linalg.svd(original.model.encoder.layers[0].fc1.weight)
    wanted = x @ (u[:, :18] * s[:18] @ vt[:18]).T + original.model.encoder.layers[0].fc1.bias
    torch.testing.assert_close(fc1(x), wanted, rtol=1e-4, atol=1e-6)


def test_aim_latency_leaves_alone_what_would_be_slower_and_says_why(tmp_path):
    """Decoders get one token a step, encoders whole texts, and so do keys and values of cross-attention."""
    folder = tiny.marian(tmp_path / "model", d_model=128, encoder_ffn_dim=256, decoder_ffn_dim=256)
    include = ["*.0.fc1", "*.1.fc1", "*.0.encoder_attn.*"]
    ctx = harness.run(Factorize(), FactorizeSettings(rank=36, include=include), folder, tmp_path / "out")
    pairs = {f"model.encoder.layers.{n}.fc1" for n in range(2)}
    pairs |= {f"model.decoder.layers.0.encoder_attn.{n}_proj" for n in "kv"}
    assert ctx.facts["ranks"] == dict.fromkeys(pairs, 36)
    told = ctx.facts["left_alone"]
    assert told["model.decoder.layers.0.fc1"] == (
        "rank 36 of 256 x 128 would be slower in int8, as every rank would"
    )
    assert told.keys() == {
        *(f"model.decoder.layers.{n}.fc1" for n in range(2)),
        *(f"model.decoder.layers.0.encoder_attn.{n}_proj" for n in ("q", "out")),
    }
    wide = FactorizeSettings(rank=76, include=include)
    told = harness.run(Factorize(), wide, folder, tmp_path / "wide").facts["left_alone"]
    # (0.9 * 256 * 128 - 5000) / 384 = 63.8; 256 * 128 / 384 = 85.3; 128 * 128 / 256 = 64
    assert told["model.encoder.layers.0.fc1"] == (
        "rank 76 of 256 x 128 would be slower in int8; it would have to be below 63.8"
    )
    assert told["model.decoder.layers.0.encoder_attn.k_proj"] == (
        "rank 76 of 128 x 128 saves nothing; it would have to be below 64.0"
    )


def test_nothing_that_is_faster_is_a_warning_that_names_the_other_aim(source, tmp_path):
    ctx = context(tmp_path)
    Factorize()(source, FactorizeSettings(rank=15, include=["model.decoder.*.fc1"]), ctx)
    assert ctx.facts["ranks"] == {}
    [warning] = ctx.warnings
    assert "no rank saves time in int8" in warning
    assert "or give aim: size for what saves weights" in warning


def test_a_second_factorization_does_not_split_the_halves(source, tmp_path):
    ctx = context(tmp_path)
    Factorize()(source, FactorizeSettings(rank=8, aim="size"), ctx)
    again = context(tmp_path / "out")
    with pytest.raises(InputError, match="choose no linear layer"):
        Factorize()(Artifact(ctx.out, source.manifest), FactorizeSettings(rank=4), again)


def test_all_layers_left_alone_is_a_warning_and_changes_nothing(source, tmp_path):
    ctx = context(tmp_path)
    Factorize()(source, FactorizeSettings(energy=1.0, aim="size"), ctx)
    assert ctx.facts["ranks"] == {}
    assert len(ctx.warnings) == 1
    assert "left all 32 layers alone" in ctx.warnings[0]
    assert not (ctx.out / "structure.json").exists()
    assert json.loads((ctx.out / "config.json").read_text())["encoder_layers"] == 2


def test_two_ways_to_say_the_rank_are_refused():
    with pytest.raises(ValidationError, match="give one of energy, rank and ratio"):
        FactorizeSettings(energy=0.9, rank=4)
