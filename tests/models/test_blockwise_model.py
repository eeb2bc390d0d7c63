"""A model whose blocks are read one at a time computes what the whole model computes."""

from contextlib import ExitStack

import pytest
import torch

from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.compress.share_weights import ShareWeights, ShareWeightsSettings
from smelt.core import system
from smelt.core.errors import RunError
from smelt.evaluate.layer_sqnr import BlockwiseModel
from smelt.models.checkpoint import load_model, save_model
from smelt.models.families.registry import blocks_of
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import every_family


def in_memory(blockwise):
    """The blocks of a model that are in memory."""
    blocks = blocks_of(blockwise.model)
    return [b.module_path for b in blocks if not all(p.is_meta for p in b.module.parameters())]


def require_equal(folder):
    """Require equal outputs with blocks in memory one after the other, and no block in memory afterwards."""
    blockwise = BlockwiseModel(folder)
    blocks = blocks_of(blockwise.model)
    assert in_memory(blockwise) == []
    assert blockwise.model.device.type == "cpu"  # transformers': that of the first parameter
    for block in blocks:
        with blockwise.loaded(block.module):
            assert block.module_path in in_memory(blockwise)
    with ExitStack() as loaded:
        for block in blocks:
            loaded.enter_context(blockwise.loaded(block.module))
        outputs = harness.logits(blockwise.model)
    assert in_memory(blockwise) == []
    assert torch.equal(outputs, harness.logits(load_model(folder)[0]))


@pytest.mark.parametrize("family", every_family.DISTINCT_FAMILIES)
def test_outputs_equal_loaded_model(family):
    require_equal(every_family.model_with_layers(family, 2))


@pytest.mark.parametrize(
    ("family", "stage", "settings"),
    [
        ("gpt2", Quantize(), QuantizeSettings(scheme="int8-dynamic")),
        ("marian", Quantize(), QuantizeSettings(scheme="int4")),
        ("bert", ShareWeights(), ShareWeightsSettings()),
        ("gpt2", Factorize(), FactorizeSettings(energy=0.5)),
    ],
)
def test_outputs_of_changed_structures_equal_loaded_model(family, stage, settings, tmp_path):
    source = every_family.model_with_layers(family, 2)
    require_equal(every_family.run_stage(stage, settings, source, family, tmp_path / "out").out)


def test_half_precision_weights_are_widened(tmp_path):
    source = every_family.model_with_layers("gpt2", 2)
    save_model(*load_model(source), tmp_path, source, "fp16")
    require_equal(tmp_path)


def test_model_that_does_not_fit_is_refused(monkeypatch):
    folder = every_family.model_with_layers("bert", 3)
    model = load_model(folder)[0]
    count = sum(p.numel() for p in model.parameters())
    block = sum(p.numel() for p in blocks_of(model)[0].module.parameters())
    monkeypatch.setattr(system, "available_bytes", lambda: 4 * (count - 2 * block))
    BlockwiseModel(folder)
    monkeypatch.setattr(system, "available_bytes", lambda: 4 * (count - 2 * block) - 1)
    with raises_code("out-of-memory", RunError):
        BlockwiseModel(folder)
