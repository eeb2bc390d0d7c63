"""Rotated models compute the same; their channels have no outliers, or are principal axes."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from scipy.linalg import hadamard
from scipy.stats import kurtosis

from smelt.calibration.samples import load_calibration_samples
from smelt.calibration.statistics import collect_statistics
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.compress.rotate.rotations import random_hadamard, random_rotation_with_mean
from smelt.compress.rotate.settings import RotateSettings
from smelt.compress.rotate.stage import Rotate
from smelt.compress.share_weights import ShareWeights, ShareWeightsSettings
from smelt.core.errors import InputError
from smelt.core.files import read_json_object
from smelt.core.messages import message_codes
from smelt.export.onnx_stage import Onnx
from smelt.export.package.huggingface import write_published_names
from smelt.export.settings import OnnxSettings
from smelt.models.checkpoint import load_model, save_model
from smelt.models.families.registry import FAMILIES, hidden_norm_names, model_attentions, norm_consumers
from smelt.models.model_size import SizeInputs, count_parameters, read_model_size, size_from_config
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import every_family, images, seq2seq, tiny
from tests.support.models.every_family import DISTINCT_FAMILIES

ROTATABLE = {
    "t5", "mt5", "gpt2", "opt", "llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "starcoder2",
    "granite", "smollm3", "gpt_neox", "phi", "vit",
}  # fmt: skip
"""Families whose hidden states can be rotated; a new family may be one too."""


@pytest.fixture
def trained_norms(tmp_path):
    """Return a function that writes a model of a family whose norms and biases have random values."""

    def write(family, layers=2, change=lambda model: None):
        source, folder = every_family.model_with_layers(family, layers), tmp_path / f"{family}-trained"
        model, edits = load_model(source)
        torch.manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    noise = torch.rand_like(parameter)
                    parameter.add_(noise if name.endswith(".weight") else noise - 0.5)
            change(model)
        folder.mkdir()
        save_model(model, edits, folder, source)
        return folder

    return write


def rotate(source, family, out, **settings):
    """Run `rotate` on `source`; return its context."""
    return every_family.run_stage(Rotate(), RotateSettings(**settings), source, family, out)


def outputs(model):
    """Return the logits of a model of texts or images."""
    if FAMILIES[model.config.model_type].input_kind == "texts":
        return harness.logits(model)
    pixels = torch.randn(2, 3, *[model.config.image_size] * 2, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(pixels).logits


@pytest.mark.parametrize("family", [*DISTINCT_FAMILIES, "vit"])
def test_rotated_model_equals_original(family, trained_norms, tmp_path):
    source = trained_norms(family)
    errors, _ = Rotate.check_model(RotateSettings(), read_json_object(source / "config.json"))
    assert [(error.code, error.setting) for error in errors] == (
        [] if family in ROTATABLE else [("fixed-basis", "targets")]
    )
    if errors:
        with raises_code("fixed-basis", InputError):
            rotate(source, family, tmp_path / "refused")
    settings = {"targets": ["heads"]} if errors else {}
    if family == "vit":
        rows = images.read_rows(images.write_rows(tmp_path / "rows.jsonl"))
        ctx = harness.run_stage(Rotate(), RotateSettings(), source, tmp_path / "out", images.TASK, rows)
    else:
        ctx = rotate(source, family, tmp_path / "out", **settings)
    original, rotated = load_model(source)[0], load_model(ctx.out)[0]
    expected = outputs(original)
    # mT5's scores have no divisor: in float32 the original itself is off by 1e-5 from float64
    torch.testing.assert_close(outputs(rotated), expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
    assert ctx.warnings == []

    for attention in model_attentions(original):
        out = [model.get_submodule(attention.out).weight for model in (original, rotated)]
        assert not torch.allclose(*out, atol=1e-2)
    offset = 1.0 if family == "gemma" else 0.0
    for name in hidden_norm_names(rotated) if family in ROTATABLE else ():
        weight = rotated.get_submodule(name).weight
        assert torch.equal(weight, torch.full_like(weight, 1 - offset))
    if family == "mixtral":  # whose published names transformers reads, and computes in another order
        write_published_names(ctx.out)
    config = read_json_object(ctx.out / "config.json")
    plain = getattr(transformers, config["architectures"][0]).from_pretrained(ctx.out).eval()
    atol = 2e-5 * float(expected.abs().max()) if family == "mixtral" else 0
    torch.testing.assert_close(outputs(plain), outputs(rotated), rtol=0, atol=atol)


def test_output_layer_with_norm_weight_is_untied(trained_norms, tmp_path):
    source = trained_norms("qwen2")
    _, planned_config = Rotate.check_model(RotateSettings(), read_json_object(source / "config.json"))
    ctx = rotate(source, "qwen2", tmp_path / "out")
    original, rotated = load_model(source)[0], load_model(ctx.out)[0]
    assert original.lm_head.weight is original.model.embed_tokens.weight
    assert rotated.lm_head.weight is not rotated.model.embed_tokens.weight
    assert not planned_config["tie_word_embeddings"]
    assert not rotated.config.tie_word_embeddings
    added = ctx.details["parameters_after"] - ctx.details["parameters_before"]
    assert added == original.lm_head.weight.numel()


@pytest.mark.parametrize(("family", "config"), [
    ("t5", {}), ("t5", {"gated": True}), ("qwen2", {"tie_word_embeddings": True}),
    ("llama", {"tie_word_embeddings": False}), ("opt", {"_remove_final_layer_norm": True}),
], ids=str)  # fmt: skip
def test_plan_predicts_config_and_size_of_result(family, config, tmp_path):
    """T5 has a factor of the output layer that belongs to a tie, and keeps both in its config."""
    write = seq2seq.write_t5 if family == "t5" else partial(every_family.make_model, family=family)
    source = write(tmp_path / "model", **config)
    before = read_json_object(source / "config.json")
    errors, planned = Rotate.check_model(RotateSettings(), before)
    ctx = rotate(source, family, tmp_path / "out")
    result = read_json_object(ctx.out / "config.json")
    keys = ("tie_word_embeddings", "scale_decoder_outputs")
    assert errors == []
    assert [planned.get(key) for key in keys] == [result.get(key) for key in keys]
    size = read_model_size(source, before)
    planned_size = replace(size_from_config(planned), other_weights=size.other_weights)
    inputs = SizeInputs(size, planned_size, FAMILIES[family].tasks[0], {})
    assert Rotate.estimate_size(RotateSettings(), inputs).result.parameters == count_parameters(ctx.out)


def test_output_layer_without_final_norm_is_still_tied(tmp_path):
    source = every_family.make_model(tmp_path / "model", "opt", _remove_final_layer_norm=True)
    ctx = rotate(source, "opt", tmp_path / "out")
    original, rotated = load_model(source)[0], load_model(ctx.out)[0]
    assert rotated.lm_head.weight is rotated.model.decoder.embed_tokens.weight
    expected = harness.logits(original)  # of states without a norm, with values up to 50
    torch.testing.assert_close(
        harness.logits(rotated), expected, rtol=0, atol=1e-5 * float(expected.abs().max())
    )


@pytest.mark.quick
@pytest.mark.parametrize("size", [1, 2, 15, 64, 96])
def test_random_hadamard_is_orthogonal_with_even_entries(size):
    matrix = random_hadamard(size, np.random.default_rng(0))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))
    power = size & -size
    if power == size:  # the rows are those of the Hadamard matrix, with signs
        torch.testing.assert_close(
            (matrix @ torch.from_numpy(hadamard(size).T).double()).abs(),
            torch.eye(size, dtype=torch.float64) * size**0.5,
        )
    assert float(matrix.abs().max()) <= power**-0.5 + 1e-12


@pytest.mark.quick
def test_random_rotation_with_mean_maps_ones_to_ones():
    matrix = random_rotation_with_mean(48, np.random.default_rng(0))
    ones = torch.ones(48, dtype=torch.float64)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(48, dtype=torch.float64))
    torch.testing.assert_close(ones @ matrix, ones)
    assert float(matrix.abs().max()) < 0.75


def plant_outlier(model):
    """Make one channel of the hidden states 30 times as large as the others."""
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 3] *= 30


def reader_inputs(model):
    """Return the inputs of the layers that read a norm, by norm, float32 [tokens, D]."""
    seen = {}
    for norm in norm_consumers(model):
        if norm.consumers:
            model.get_submodule(norm.consumers[0]).register_forward_hook(
                lambda _, inputs, result, name=norm.norm: seen.update({name: inputs[0].flatten(0, -2)})
            )
    harness.logits(model)
    return seen


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_rotation_spreads_planted_outlier(family, trained_norms, tmp_path):
    source = trained_norms(family, change=plant_outlier)
    ctx = rotate(source, family, tmp_path / "out")
    before, after = (reader_inputs(load_model(folder)[0]) for folder in (source, ctx.out))
    first = next(iter(before))
    assert kurtosis(before[first].flatten()) > 10
    assert kurtosis(after[first].flatten()) < 2


def test_quantized_rotated_model_has_lower_error_with_outlier(trained_norms, tmp_path):
    source = trained_norms("qwen3", change=plant_outlier)
    rotated = rotate(source, "qwen3", tmp_path / "rotated").out
    expected, errors = harness.logits(load_model(source)[0]), []
    for folder in (source, rotated):
        settings, out = QuantizeSettings(scheme="int4", group_size=32), tmp_path / f"{folder.name}-int4"
        every_family.run_stage(Quantize(), settings, folder, "qwen3", out)
        errors.append(float((harness.logits(load_model(out)[0]) - expected).square().mean()))
    assert errors[1] < 0.7 * errors[0]


def test_exported_quantized_rotated_model_is_close_to_float(trained_norms, tmp_path):
    source = trained_norms("qwen2", layers=1)
    rotated = rotate(source, "qwen2", tmp_path / "rotated").out
    settings, coded = QuantizeSettings(scheme="int8-dynamic"), tmp_path / "int8"
    every_family.run_stage(Quantize(), settings, rotated, "qwen2", coded)
    expected, logits = (harness.logits(load_model(folder)[0]) for folder in (source, coded))
    assert 0 < float((logits - expected).std()) < 0.05 * float(expected.std())
    # the stage compares the graph with the model, and raises if they differ
    ctx = every_family.run_stage(Onnx(), OnnxSettings(), coded, "qwen2", tmp_path / "onnx")
    assert ctx.details["parity"].keys() == ctx.details["graphs"].keys()


def total_second_moment(folder, source, ctx):
    """Return the sum over norms of the second moments of their outputs, without weights, float64 [D, D]."""
    model = load_model(folder)[0]
    samples = load_calibration_samples(model, tiny.as_artifact(source, ctx.task), 4, ctx, "test", padded=True)
    norms = {norm.norm: norm.consumers for norm in norm_consumers(model) if norm.consumers}
    layers = {name: [model.get_submodule(consumers[0])] for name, consumers in norms.items()}
    total = 0
    with collect_statistics(model, samples, layers, ctx) as statistics:
        for name, inputs in statistics.items():
            weight = model.get_submodule(name).weight.detach().double()
            total = total + inputs.second_moment / inputs.tokens / torch.outer(weight, weight)
    return total.numpy()


def test_principal_axes_diagonalize_second_moment(trained_norms, tmp_path):
    source = trained_norms("llama")
    ctx = rotate(source, "llama", tmp_path / "out", method="pca", calibration_samples=4)
    original, rotated = load_model(source)[0], load_model(ctx.out)[0]
    torch.testing.assert_close(harness.logits(rotated), harness.logits(original), rtol=0, atol=1e-4)
    eigenvalues = np.linalg.eigvalsh(total_second_moment(source, source, ctx))[::-1]
    np.testing.assert_allclose(
        total_second_moment(ctx.out, source, ctx), np.diag(eigenvalues), atol=1e-4 * eigenvalues[0]
    )


def test_layers_that_share_weights_keep_hidden_states_unrotated(trained_norms, tmp_path):
    source = trained_norms("llama")
    shared = every_family.run_stage(
        ShareWeights(), ShareWeightsSettings(), source, "llama", tmp_path / "shared"
    ).out
    ctx = rotate(shared, "llama", tmp_path / "out")
    original, rotated = load_model(shared)[0], load_model(ctx.out)[0]
    assert message_codes(ctx.warnings) == ["shared-layers"]
    assert ctx.details["rotated_channels"] == 0
    assert torch.equal(rotated.lm_head.weight, original.lm_head.weight)
    layers = rotated.model.layers
    assert layers[0].self_attn.v_proj is layers[1].self_attn.v_proj
    assert not torch.equal(
        layers[0].self_attn.v_proj.weight, original.model.layers[0].self_attn.v_proj.weight
    )
    torch.testing.assert_close(harness.logits(rotated), harness.logits(original), rtol=0, atol=1e-4)


def test_factorized_layers_are_rotated(trained_norms, tmp_path):
    source = trained_norms("gpt2")
    settings = FactorizeSettings(rank=8, optimize_for="size", method="svd")
    factorized = every_family.run_stage(Factorize(), settings, source, "gpt2", tmp_path / "low-rank").out
    ctx = rotate(factorized, "gpt2", tmp_path / "out")
    original, rotated = load_model(factorized)[0], load_model(ctx.out)[0]
    assert ctx.details["rotated_attentions"] == 2
    torch.testing.assert_close(harness.logits(rotated), harness.logits(original), rtol=0, atol=1e-4)


def test_bias_of_norm_with_zero_weight_raises_without_bias_in_reader(trained_norms, tmp_path):
    def zero_weight(model):
        model.transformer.ln_f.weight[5] = 0

    with raises_code("zero-norm-weight", InputError):
        rotate(trained_norms("gpt2", change=zero_weight), "gpt2", tmp_path / "out")


def test_models_without_attention_are_refused():
    config = {"model_type": "resnet"}
    (error,), _ = Rotate.check_model(RotateSettings(), config)
    assert error.code == "does-not-fit-model"


def test_principal_axes_need_norms_without_mean(trained_norms, tmp_path):
    with raises_code("fixed-basis", InputError):
        rotate(trained_norms("gpt2"), "gpt2", tmp_path / "out", method="pca")


@pytest.mark.quick
def test_principal_axes_of_heads_alone_are_refused():
    with raises_setting_codes("unused-setting"):
        RotateSettings(method="pca", targets=["heads"])


@pytest.mark.quick
def test_calibration_samples_without_principal_axes_are_refused():
    with raises_setting_codes("unused-setting"):
        RotateSettings(calibration_samples=8)


def test_quantized_model_is_refused(tmp_path):
    source = every_family.model_with_layers("llama", 2)
    coded = every_family.run_stage(
        Quantize(), QuantizeSettings(scheme="int8-dynamic"), source, "llama", tmp_path / "int8"
    ).out
    with raises_code("behind-quantize", InputError):
        rotate(coded, "llama", tmp_path / "out")
