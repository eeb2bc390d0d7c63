"""SmoothQuant in the stage: planted outliers cost less, and what follows the stage goes on as before."""

import pytest
import torch

from smelt.compress.quantize.qat import convert_qat, load_trainable
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.core.artifact import Artifact, Manifest
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.data.splits import Columns, Split
from smelt.models.checkpoint import load_model, save_model
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import causal

TASK = "language-modeling"
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
PRODUCERS = {"self_attn.v_proj": "self_attn.o_proj", "mlp.up_proj": "mlp.down_proj"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return causal.write_model(tmp_path_factory.mktemp("llama") / "model", "llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def planted(llama, tmp_path_factory):
    """Nearly the same function, two of whose 64 channels are 60 times as large between norms and products."""
    out = tmp_path_factory.mktemp("planted")
    model, edits = load_model(llama)
    with torch.no_grad():
        model.model.norm.weight[3] = 1.5  # or export leaves a norm out that multiplies with ones
        for layer in model.model.layers:
            for norm, readers in READERS.items():
                layer.get_submodule(norm).weight[[5, 40]] *= 60
                for name in readers:
                    layer.get_submodule(name).weight[:, [5, 40]] /= 60
    save_model(model, edits, out, llama)
    return out


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return read_split(str(causal.write_lines(folder / "text.txt", 8)), TASK, Columns(), folder)


def run(source, out, data, scheme="int8-static", **settings):
    """Quantize; where rows are looked at, no damage is measured unless a test wants it."""
    looks = scheme == "int8-static" or "smoothquant_alpha" in settings
    settings = QuantizeSettings(scheme=scheme, **({"sensitivity_samples": 0} if looks else {}) | settings)
    return harness.run_stage(Quantize(), settings, source, out, TASK, data)


def error(source, out, data, **settings):
    """The change of the logits by `quantize` of the blocks' products, in parts of their spread."""
    ctx = run(source, out, data, embeddings=False, output_layer=False, **settings)
    float_logits, quantized_logits = (
        harness.logits(load_model(source)[0]),
        harness.logits(harness.load_output_model(ctx)),
    )
    return float((quantized_logits - float_logits).square().mean().sqrt() / float_logits.std())


@pytest.mark.parametrize("scheme", ["int8-static", "int8-dynamic"])
def test_smoothing_lowers_error_only_with_outliers(llama, planted, data, scheme, tmp_path):
    without = error(planted, tmp_path / "planted", data, scheme=scheme)
    helped = error(planted, tmp_path / "helped", data, scheme=scheme, smoothquant_alpha=0.5)
    control = error(llama, tmp_path / "control", data, scheme=scheme)
    same = error(llama, tmp_path / "same", data, scheme=scheme, smoothquant_alpha=0.5)
    assert helped < 0.4 * without
    assert 0.6 * control < same < 1.4 * control


@pytest.fixture(scope="module")
def planted_producers(llama, tmp_path_factory):
    """The same function, with two value channels and two neurons 60 times as large."""
    out = tmp_path_factory.mktemp("producers")
    model, edits = load_model(llama)
    with torch.no_grad():
        for producer, reader in PRODUCERS.items():
            model.model.layers[0].get_submodule(producer).weight[[5, 14]] *= 60
            columns = model.model.layers[0].get_submodule(reader).weight
            repeats = 1 if "mlp" in reader else model.config.num_attention_heads // 2
            width = columns.shape[1] // model.config.num_attention_heads if repeats > 1 else 0
            for channel in (5, 14):
                head, offset = divmod(channel, width) if width else (0, channel)
                for copy in range(repeats):
                    columns[:, (head * repeats + copy) * width + offset] /= 60
    save_model(model, edits, out, llama)
    return out


def test_outliers_of_values_and_neurons_need_targets_beyond_norms(llama, planted_producers, data, tmp_path):
    """Value heads that several query heads read share their scales."""
    torch.testing.assert_close(
        harness.logits(load_model(planted_producers)[0]),
        harness.logits(load_model(llama)[0]),
        rtol=1e-3,
        atol=1e-4,
    )
    norms_only, with_layers = (
        error(planted_producers, tmp_path / "-".join(targets), data, smoothquant_alpha=0.5,
              smoothquant_targets=targets)
        for targets in (["norms"], ["norms", "layers"])
    )  # fmt: skip
    assert with_layers < 0.4 * norms_only


def test_report_lists_smoothed_norms_and_outliers(planted, data, tmp_path):
    ctx = run(planted, tmp_path / "out", data, smoothquant_alpha=0.5)
    norms, layers = ([f"model.layers.0.{name}" for name in names] for names in (READERS, PRODUCERS.values()))
    assert list(ctx.details["smoothed"]) == [*norms, "model.norm", *layers]
    for name in norms:
        details = ctx.details["smoothed"][name]
        assert details["outliers_before"] > 20
        assert details["outliers_after"] < 0.3 * details["outliers_before"]
    assert ctx.warnings == []
    assert ctx.details["calibration"]["samples"] > 0


def test_qat_starts_from_quantized_weights(planted, data, tmp_path):
    """The scales are not stored, so the float weights before `quantize` cannot be used."""
    quantized = run(planted, tmp_path / "quantized", data, smoothquant_alpha=0.5).out
    source, step = (
        Artifact(folder, Manifest(
            key=key * 64, format="torch", task=TASK, stage=stage, settings=settings, seed=0,
            parent=parent and parent * 64, versions={},
        ))
        for folder, key, stage, parent, settings in (
            (planted, "a", "model", None, {}), (quantized, "b", "quantize", "a", {"smoothquant_alpha": 0.5})
        )
    )  # fmt: skip
    ctx = harness.make_context(
        tmp_path / "trained", TASK, data, ancestors={"model": source, "quantize": step}
    )
    model, _ = load_trainable(step, ctx)
    convert_qat(model, ctx)
    assert ctx.details == {"latent_weights": "codes", "codes_changed": 0.0}


def test_smoothing_adds_no_graph_nodes(planted, data, tmp_path):
    from collections import Counter

    import onnx

    from smelt.export.onnx_stage import Onnx
    from smelt.export.settings import OnnxSettings

    op_counts = []
    for name, more in (("plain", {}), ("smooth", {"smoothquant_alpha": 0.5})):
        quantized = run(planted, tmp_path / f"{name}-codes", data, **more).out
        settings = OnnxSettings()
        ctx = harness.run_stage(Onnx(), settings, quantized, tmp_path / name, TASK, data)
        graphs = sorted(ctx.out.glob("*.onnx"))
        op_counts.append([Counter(node.op_type for node in onnx.load(path).graph.node) for path in graphs])
    assert op_counts[0] == op_counts[1]
    assert op_counts[0]


def test_smoothquant_needs_calibration_data_for_every_scheme(planted, tmp_path):
    settings = QuantizeSettings(smoothquant_alpha=0.5)
    assert Quantize.needs_with(settings, ["train"]) == {"train"}
    assert Quantize.needs_with(settings, ["train", "calibration"]) == {"calibration"}
    with raises_code("no-calibration-data", InputError):
        run(planted, tmp_path / "none", {}, scheme="int8-dynamic", smoothquant_alpha=0.5)


def test_few_calibration_tokens_warn(planted, data, tmp_path):
    few = Split("few.txt", data.examples, data.windows)
    ctx = run(
        planted, tmp_path / "out", few, scheme="int8-dynamic", smoothquant_alpha=0.5, calibration_samples=1
    )
    assert message_codes(ctx.warnings) == ["few-calibration-tokens"]
    assert "few.txt" in ctx.warnings[0].message
