"""Models whose scales are learned while they train: what is stored, exported, refused, and what is gained."""

import copy

import pytest
import torch
from torch import nn

from smelt.compress.distill.stage import Distill, DistillSettings
from smelt.compress.finetune import Finetune, FinetuneSettings, train_with_techniques
from smelt.compress.quantize.plan_layers import quantize_into, quantize_module
from smelt.compress.quantize.qat import QatLinear, as_converted, load_trainable, qat_layers
from smelt.compress.quantize.qat_extensions import StepSizeTraining
from smelt.compress.quantize.qat_settings import QatSettings
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.compress.quantize.step_sizes import StepSizes
from smelt.core.errors import InputError
from smelt.core.store import StepCheckpoints, Store
from smelt.data.splits import Example, Split
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.models.checkpoint import load_model
from smelt.models.families.registry import FAMILIES
from smelt.quantization.layers import is_quantized
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import every_family, tiny

TASK = "text-classification"
LSQ = {"qat": {"scales": "lsq", "learning_rate": 0.05}}
TRAIN = {"max_steps": 4, "learning_rate": 2e-3, "batch_size": 4, "precision": "fp32", "num_evals": 0} | LSQ
ROWS = Split("x", tuple(Example(s, label=i % 2) for i, s in enumerate(tiny.SENTENCES)))
STATIC = {"scheme": "int8-static", "calibration_samples": 4, "sensitivity_samples": 0}
CELLS = [
    ("bert", STATIC), ("marian", {"scheme": "int8-dynamic"}),
    ("gpt2", {"scheme": "int4", "symmetric": False}), ("modernbert", {"scheme": "int2", "group_size": 32}),
    ("gpt2", {"scheme": "ternary", "granularity": "channel"}),
]  # fmt: skip


def coded(out, family="bert", **settings):
    source = every_family.model_with_layers(family, 2)
    return every_family.run_stage(Quantize(), QuantizeSettings(**settings), source, family, out).out


def scales_of(folder):
    layers = {name: m for name, m in load_model(folder)[0].named_modules() if is_quantized(m)}
    return {name: layer.matrix.unpack().qparams["scales"] for name, layer in layers.items()}


@pytest.mark.parametrize(
    ("family", "settings"), CELLS, ids=lambda v: v if isinstance(v, str) else v["scheme"]
)
def test_learned_scales_are_stored_and_exported(family, settings, tmp_path):
    """The graphs of encoders agree with them, layer by layer: the export compares and fails otherwise."""
    quantized = coded(tmp_path / "coded", family, **settings)
    ctx = every_family.run_stage(Finetune(), FinetuneSettings(**TRAIN), quantized, family, tmp_path / "out")
    details = ctx.details["learned_scales"]
    assert details["mean_change"] > 0.01
    assert ("ranges" in details) == (settings["scheme"] == "int8-static")
    before, after = scales_of(quantized), scales_of(ctx.out)
    assert all(not after[name].equal(before[name]) for name in before)
    structures = [(folder / "structure.json").read_bytes() for folder in (quantized, ctx.out)]
    assert structures[0] == structures[1]
    if FAMILIES[family].architecture == "encoder":
        every_family.run_stage(Onnx(), OnnxSettings(), ctx.out, family, tmp_path / "onnx")


def learning(folder, out, task=TASK):
    ctx = harness.make_context(out, task, ROWS)
    model, edits = load_trainable(tiny.as_artifact(folder, task), ctx)
    return model, edits, ctx


def test_layers_with_one_input_share_learned_range(tmp_path):
    """Else queries, keys and values would leave as three products."""
    quantized = coded(tmp_path / "coded", **STATIC)
    ctx = every_family.run_stage(Finetune(), FinetuneSettings(**TRAIN), quantized, "bert", tmp_path / "out")

    def ranges(folder):
        part = load_model(folder)[0].bert.encoder.layer[0].attention.self
        return [float(layer.matrix.input_scale) for layer in (part.query, part.key, part.value)]

    before, after = ranges(quantized), ranges(ctx.out)
    assert len(set(before)) == len(set(after)) == 1
    assert before != after
    # two blocks of five inputs, pooler and classifier; an embedding has none
    layers = sum(
        1
        for m in load_model(quantized)[0].modules()
        if isinstance(m, nn.Module) and hasattr(m, "with_outputs")
    )
    assert layers == 14
    assert ctx.details["learned_scales"]["ranges"] == 2 * 4 + 2


def test_converted_copy_equals_training_model(tmp_path):
    quantized = coded(tmp_path / "coded", scheme="int4", group_size=32)
    model, edits, ctx = learning(quantized, tmp_path / "out")
    train_with_techniques(
        model,
        tiny.as_artifact(quantized, TASK),
        FinetuneSettings(**TRAIN),
        ctx,
        edits=edits,
        stage="finetune",
    )
    ids = torch.randint(5, 30, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        training_logits = model(ids).logits
        with as_converted(model):
            stored = copy.deepcopy(model)
        assert qat_layers(model)
        assert not qat_layers(stored)
        assert training_logits.allclose(stored(ids).logits, atol=1e-5)


def test_interrupted_lsq_training_resumes_with_same_result(tmp_path, monkeypatch):
    """A checkpoint holds the steps; the rest ends as if the training had not been stopped, to the bit."""
    quantized = coded(tmp_path / "coded", scheme="int4", group_size=32)
    settings = FinetuneSettings(**TRAIN | {"checkpoint_interval_minutes": 0})
    before = StepSizeTraining.finalize

    def run(name, key):
        more = {"next_checkpoint_folder": StepCheckpoints(Store(tmp_path), key).next_folder}
        return harness.run_stage(Finetune(), settings, quantized, tmp_path / name, TASK, ROWS, **more)

    def stop(self, ctx):
        raise KeyboardInterrupt

    uninterrupted = run("whole", "a")
    monkeypatch.setattr(StepSizeTraining, "finalize", stop)
    with pytest.raises(KeyboardInterrupt):
        run("stopped", "b")
    monkeypatch.setattr(StepSizeTraining, "finalize", before)
    resumed = run("again", "b")
    assert (resumed.out / "model.safetensors").read_bytes() == (
        uninterrupted.out / "model.safetensors"
    ).read_bytes()
    assert resumed.details == uninterrupted.details


def test_second_phase_continues_from_learned_step_sizes(tmp_path):
    quantized = coded(tmp_path / "coded", scheme="int4", group_size=32)
    phases = [{"losses": {"hidden_states": 1}}, {"losses": {"logits": 1}}]
    one_phase = harness.run_stage(
        Distill(), DistillSettings(**TRAIN, phases=phases[:1]), quantized, tmp_path / "one", TASK, ROWS
    )
    two_phases = harness.run_stage(
        Distill(), DistillSettings(**TRAIN, phases=phases), quantized, tmp_path / "two", TASK, ROWS
    )
    assert (
        two_phases.details["learned_scales"]["mean_change"]
        > one_phase.details["learned_scales"]["mean_change"]
    )


def test_float_models_and_schemes_without_scales_are_rejected(tmp_path):
    model = load_model(every_family.model_with_layers("bert", 1))[0]
    with raises_code("not-quantized", InputError):
        StepSizeTraining(model, QatSettings(scales="lsq"), "finetune")
    quantized = coded(
        tmp_path / "coded", scheme="binary", group_size=32, embeddings=False, output_layer=False
    )
    with raises_code("scales-not-learned", InputError) as caught:
        harness.run_stage(Finetune(), FinetuneSettings(**TRAIN), quantized, tmp_path / "out", TASK, ROWS)
    assert "binary" in str(caught.value)


def test_layers_without_learnable_scales_warn(tmp_path):
    quantized = coded(tmp_path / "coded", scheme="binary", group_size=32)  # with a vocabulary of int8
    ctx = harness.run_stage(Finetune(), FinetuneSettings(**TRAIN), quantized, tmp_path / "out", TASK, ROWS)
    (warning,) = [message for message in ctx.warnings if message.code == "scales-not-learned"]
    assert all(value in warning.message for value in ("binary", "13 layers"))
    assert ctx.details["learned_scales"]["matrices"] == 2  # word embedding and classifier


@pytest.mark.parametrize("scheme", ["int2"])
def test_learned_scales_have_lower_error_than_dynamic_scales(scheme):
    """One layer, inputs of which few count, as many updates: a scale of the weights alone is not the best."""

    def left(learn):
        torch.manual_seed(0)
        inputs = torch.randn(256, 64) * torch.logspace(-1.5, 0.5, 64)  # some inputs count far more
        float_layer = nn.Linear(64, 16, bias=False)
        nn.init.normal_(float_layer.weight, std=0.05)
        target = inputs @ float_layer.weight.detach().T
        home = quantize_module(float_layer, scheme)
        latent = QatLinear(home, nn.Parameter(float_layer.weight.detach().clone()))
        groups = [{"params": [latent.weight], "lr": 2e-3}]
        if learn:
            steps = StepSizes(home.matrix)
            latent.learn_step_sizes(steps)
            groups.append({"params": list(steps.parameters()), "lr": 1e-2})
        optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        for step in range(300):
            for group in optimizer.param_groups:
                group.setdefault("first", group["lr"])
                group["lr"] = group["first"] * (1 - step / 300)
            optimizer.zero_grad()
            loss = (latent(inputs) - target).square().mean()
            loss.backward()
            optimizer.step()
        quantize_into(home.matrix, latent.weight, latent.step_sizes.quantizer()) if learn else quantize_into(
            home.matrix, latent.weight
        )
        stored = nn.functional.linear(inputs, home.matrix.dequantize())
        return float((stored - target).square().mean() / target.square().mean())

    learned, following = left(True), left(False)
    assert learned < 0.9 * following


def test_step_sizes_have_no_weight_decay(tmp_path):
    quantized = coded(tmp_path / "coded", **STATIC)
    model, _ = load_trainable(tiny.as_artifact(quantized, TASK), harness.make_context(tmp_path / "out", TASK))
    (group,) = StepSizeTraining(model, QatSettings(scales="lsq"), "finetune").extension().groups
    assert group.weight_decay == 0
