"""GPT-2's Conv1D as linear layers: the same numbers, transformers' layout in the file."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from smelt.models.edits import replace_module
from smelt.models.empty_model import replace_conv1d, transpose_conv1d_tensors
from smelt.models.layers import LowRankLinear

pytestmark = pytest.mark.quick

IDS = torch.arange(1, 9)[None]


def _model():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=16, n_inner=24)
    return GPT2LMHeadModel(config).eval()


def test_replacing_conv1d_preserves_outputs():
    model = _model()
    with torch.no_grad():
        expected = model(IDS).logits
        replace_conv1d(model)
        torch.testing.assert_close(model(IDS).logits, expected)
    assert not any(isinstance(module, Conv1D) for module in model.modules())
    assert model.transformer.h[0].mlp.c_fc.weight.shape == (24, 16)


def test_stored_conv1d_tensors_keep_transformers_layout():
    model = _model()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    replace_conv1d(model)
    stored = transpose_conv1d_tensors(model, dict(model.state_dict()))
    assert stored.keys() == before.keys()
    assert all(torch.equal(stored[name], before[name]) for name in before)
    # and back: what is read is turned the other way
    assert torch.equal(
        transpose_conv1d_tensors(model, before)["transformer.h.0.attn.c_attn.weight"],
        model.transformer.h[0].attn.c_attn.weight,
    )


def test_factorized_conv1d_keeps_linear_layout():
    model = _model()
    replace_conv1d(model)
    replace_module(model, "transformer.h.0.mlp.c_fc", LowRankLinear(16, 24, 3))
    stored = transpose_conv1d_tensors(model, dict(model.state_dict()))
    assert stored["transformer.h.0.mlp.c_fc.up.weight"].shape == (24, 3)
    assert stored["transformer.h.0.mlp.c_proj.weight"].shape == (24, 16)


def test_other_models_are_unchanged():
    model = _model()
    model.config.model_type = "other"
    tensors = {"transformer.h.0.mlp.c_fc.weight": torch.ones(2, 3)}
    assert transpose_conv1d_tensors(model, tensors) is tensors
    assert isinstance(model.lm_head, nn.Linear)
