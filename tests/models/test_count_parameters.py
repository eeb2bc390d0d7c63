"""Weights are counted as what codes stand for: quantizing changes no count."""

import pytest

from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.models.model_size import count_parameters
from smelt.quantization.schemes.registry import SCHEMES
from tests.support.models import every_family
from tests.support.pairs import matrix


@pytest.mark.parametrize(("scheme", "kind"), matrix.matrix_cells(list(SCHEMES), ["t5", "gpt2", "bert"]))
def test_quantizing_does_not_change_parameter_count(scheme, kind, tmp_path):
    model = every_family.model_with_layers(kind, 1)
    quantized = every_family.run_stage(
        Quantize(), QuantizeSettings(scheme=scheme), model, kind, tmp_path / "out"
    )
    assert count_parameters(quantized.out) == count_parameters(model)
