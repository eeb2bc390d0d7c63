"""Operations against torch's flop counter on the float models, whose weights it multiplies."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.models.checkpoint import load_model
from smelt.models.families.registry import FAMILIES
from smelt.models.operations import count_model_operations
from tests.support import harness
from tests.support.models import every_family, images, speech
from tests.support.schemes import small_settings


def _torch_count(folder, size):
    """Half of the operations that torch counts while the model computes."""
    model, _ = load_model(folder)
    if model.main_input_name == "pixel_values" and not hasattr(model, "text_model"):
        inputs = {"pixel_values": torch.zeros(1, 3, *size)}
    elif model.main_input_name == "input_features":
        inputs = {"input_features": torch.zeros(1, model.config.num_mel_bins, 2 * speech.STATES)}
    else:
        inputs = {"input_ids": torch.ones(1, size[0], dtype=torch.long)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.ones(1, size[1], dtype=torch.long)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        if hasattr(model, "text_model"):  # without their product
            length = model.config.text_config.max_position_embeddings
            model.get_image_features(torch.zeros(1, 3, *size))
            model.get_text_features(torch.ones(1, length, dtype=torch.long))
        else:
            model(**inputs)
    return counter.get_total_flops() / 2


@pytest.mark.parametrize("family", every_family.MODELS)
def test_operations_of_every_family_equal_torch_count(family):
    folder = every_family.model_with_layers(family, 2)
    reads_images = FAMILIES[family].input_kind in ("images", "images-and-texts")
    size = (images.IMAGE_SIZE,) * 2 if reads_images else (9, 5)
    assert count_model_operations(folder, size) == _torch_count(folder, size)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("t5", small_settings("int8-dynamic") | {"embeddings": True}),
        ("bert", small_settings("int4")),
        ("gpt2", small_settings("ternary")),
        ("resnet", small_settings("int8-static")),
    ],
)
def test_quantized_layers_count_as_float_layers(family, settings, tmp_path):
    source, out = every_family.model_with_layers(family, 2), tmp_path / "out"
    settings = QuantizeSettings.model_validate(settings)
    if family == "resnet":
        rows = images.read_rows(images.write_rows(tmp_path / "rows.jsonl"))
        harness.run_stage(Quantize(), settings, source, out, images.TASK, rows)
    else:
        every_family.run_stage(Quantize(), settings, source, family, out)
    size = (images.IMAGE_SIZE,) * 2 if family == "resnet" else (9, 5)
    assert count_model_operations(out, size) == _torch_count(source, size)


def test_low_rank_layers_have_fewer_operations(tmp_path):
    source = every_family.model_with_layers("bert", 2)
    settings = FactorizeSettings(method="svd", optimize_for="size", rank=5)
    out = every_family.run_stage(Factorize(), settings, source, "bert", tmp_path / "out").out
    assert count_model_operations(out, (9, 1)) == _torch_count(out, (9, 1)) < _torch_count(source, (9, 1))
