"""The stage: which layers become pairs, what it says of the others, and what rows it looks at."""

import json

import harness
import pytest
import torch
from pydantic import ValidationError
from transformers import MarianConfig, MarianMTModel

from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.core.artifact import Artifact, Manifest
from smelt.core.errors import InputError
from smelt.runtime.layers.low_rank import LowRankLinear
from smelt.runtime.models.checkpoint import load_model


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


def test_the_stage_factorizes_what_gains_and_names_the_rest(source, tmp_path):
    ctx = context(tmp_path)
    Factorize()(source, FactorizeSettings(method="svd", rank=18, exclude=["lm_head", "model.decoder.*"]), ctx)
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


def test_a_second_factorization_does_not_split_the_halves(source, tmp_path):
    ctx = context(tmp_path)
    Factorize()(source, FactorizeSettings(method="svd", rank=8), ctx)
    again = context(tmp_path / "out")
    with pytest.raises(InputError, match="choose no linear layer"):
        Factorize()(Artifact(ctx.out, source.manifest), FactorizeSettings(method="svd", rank=4), again)


def test_all_layers_left_alone_is_a_warning_and_changes_nothing(source, tmp_path):
    ctx = context(tmp_path)
    Factorize()(source, FactorizeSettings(method="svd", energy=1.0), ctx)
    assert ctx.facts["ranks"] == {}
    assert len(ctx.warnings) == 1
    assert "left all 32 layers alone" in ctx.warnings[0]
    assert not (ctx.out / "structure.json").exists()
    assert json.loads((ctx.out / "config.json").read_text())["encoder_layers"] == 2


def test_two_ways_to_say_the_rank_are_refused():
    with pytest.raises(ValidationError, match="give one of energy, rank, ratio and budget"):
        FactorizeSettings(energy=0.9, rank=4)
