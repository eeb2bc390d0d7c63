"""Weights that are in no file equal those that transformers computes."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.pegasus.modeling_pegasus import PegasusSinusoidalPositionalEmbedding

from smelt.models.computed_weights import compute_weights


@pytest.mark.parametrize("width", [8, 33, 256])
@pytest.mark.parametrize("cls", [MarianSinusoidalPositionalEmbedding, PegasusSinusoidalPositionalEmbedding])
def test_a_sine_table_equals_transformers(cls, width):
    module = cls(70, width).to("meta")
    compute_weights(SimpleNamespace(), module)
    torch.testing.assert_close(module.weight, cls(70, width).create_weight(), rtol=0, atol=0)
