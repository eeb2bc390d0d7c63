"""Models whose binary layers are fed two values (BiT): stored, trained on, exported, refused."""

import json
from pathlib import Path

import every_family
import harness
import images
import pytest
import tiny
import torch
from expected_errors import raises_code, raises_setting_codes
from safetensors.torch import load_file

import smelt
from smelt.compress.calibration.samples import input_hooks, load_calibration_samples, model_outputs
from smelt.compress.distill.stage import Distill, DistillSettings
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.quantize.binarize_inputs import BinaryInputTraining, insert_binary_inputs
from smelt.compress.quantize.plan_layers import quantize_module
from smelt.compress.quantize.qat import load_trainable
from smelt.compress.quantize.qat_settings import QatSettings
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.compress.share_weights import ShareWeights, ShareWeightsSettings
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.data.splits import Example, Split
from smelt.export.onnx_settings import OnnxSettings
from smelt.export.onnx_stage import Onnx
from smelt.models.checkpoint import load_model, save_model
from smelt.models.count_parameters import count_parameters
from smelt.models.structure import read_edits
from smelt.quantization.binary_input_linear import BinaryInputs
from smelt.quantization.layers import LowRankCorrectedLinear, QuantizedLinear, is_quantized, layer_scheme

BINARY = {"scheme": "binary", "group_size": 32}
TRAIN = {"max_steps": 3, "learning_rate": 1e-2, "batch_size": 4, "precision": "fp32", "num_evals": 0}
BITS = {"qat": {"activations": "one-bit", "learning_rate": 0.05}}
TASK = "text-classification"
ROWS = Split("x", tuple(Example(s, label=i % 2) for i, s in enumerate(tiny.SENTENCES)))
RECIPE = """\
model: model
task: text-classification
data: {train: rows.jsonl, validation: rows.jsonl, test: rows.jsonl}
stages:
  - quantize: {scheme: binary, group_size: 32}
  - distill:
      qat: {activations: one-bit}
      max_steps: 20
      learning_rate: 1.0e-2
      batch_size: 4
      precision: fp32
      num_evals: 4
    name: both
  - onnx: {target: ort-cpu}
score: {latency: false}
"""
FAMILIES = ["bert", "marian", "gpt2"]  # one of each kind; gpt2 stores its weights transposed


def coded(out, family="bert", source=None, **settings):
    source = source or every_family.model_with_layers(family, 2)
    return every_family.run_stage(Quantize(), QuantizeSettings(**BINARY | settings), source, family, out).out


def trained(family, source, out, **settings):
    return every_family.run_stage(Finetune(), FinetuneSettings(**TRAIN | settings), source, family, out)


def inputs_of(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, BinaryInputs)}


def relu(tmp_path):
    """A translator whose feed-forward layers have a ReLU in the middle."""
    source = tiny.write_marian(tmp_path / "relu", activation_function="relu")
    return coded(tmp_path / "coded", "marian", source)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_learned_is_stored_trained_on_and_leaves(family, tmp_path):
    """The graph agrees with the model, layer by layer: the export compares them and fails otherwise."""
    with harness.saved_models(harness.logits) as computed:
        ctx = trained(family, coded(tmp_path / "coded", family), tmp_path / "first", **BITS)
    model = harness.load_output_model(ctx)
    layers = inputs_of(model)
    codes = [m for m in model.modules() if layer_scheme(m) == "binary"]
    details = ctx.details["binary_activations"]
    assert details["begun"] == details["layers"] == len(layers) == len(codes) >= 8
    assert details["speed_gained"].startswith("none: no runtime here multiplies bits with bits")
    assert 0.01 < details["mean_change"] < 0.3
    assert 0 < details["mean_shift"] < 0.3
    assert all(isinstance(layer.coded, QuantizedLinear) for layer in layers.values())
    assert harness.logits(model).equal(computed[-1])
    # a training that says nothing of it goes on with scales and shifts, from float weights that were kept
    more = trained(family, ctx.out, tmp_path / "more")
    assert more.details["latent_weights"] == "kept"
    assert "begun" not in more.details["binary_activations"]
    assert more.details["binary_activations"]["mean_change"] > 0.001
    assert read_edits(more.out) == read_edits(ctx.out)
    again = trained(family, more.out, tmp_path / "again", **BITS)  # nor is it begun twice
    assert "begun" not in again.details["binary_activations"]
    assert read_edits(again.out) == read_edits(ctx.out)
    left = every_family.run_stage(
        Onnx(), OnnxSettings(generation_graph=False), again.out, family, tmp_path / "onnx"
    )
    counts = [graph["operators"].get("Where", 0) for graph in left.details["graphs"].values()]
    assert sum(counts) >= len(codes)


def test_a_graph_gives_the_numbers_that_torch_gives(tmp_path):
    """Of a model with both kinds of layers; computed by a session, and by formula from the file's tensors."""
    made = trained("marian", relu(tmp_path), tmp_path / "out", **BITS)
    model, stored = harness.load_output_model(made), load_file(made.out / "model.safetensors")
    layers = inputs_of(model)
    assert {name.rpartition(".")[2] for name, m in layers.items() if not m.signed} == {"fc2"}
    assert made.details["binary_activations"]["signed"] == sum(m.signed for m in layers.values())
    assert len(layers) - made.details["binary_activations"]["signed"] == 4
    fed, name = [], "model.encoder.layers.1.fc2"
    layers[name].coded.register_forward_pre_hook(lambda module, given: fed.append(given[0]))
    layers[name].register_forward_pre_hook(lambda module, given: fed.append(given[0]))
    harness.logits(model)
    before, after = fed
    a, b = stored[f"{name}.scale"], stored[f"{name}.shift"]
    assert float(a) != 1.0
    assert b.abs().max() > 0
    assert after.allclose(a * ((before - b) / a).round().clamp(0, 1))
    left = every_family.run_stage(
        Onnx(), OnnxSettings(generation_graph=False), made.out, "marian", tmp_path / "onnx"
    )
    for graph in left.details["parity"].values():
        assert graph["mean"] < 1e-4
    tuned = every_family.run_stage(
        Onnx(), OnnxSettings(generation_graph=False, autotune=True), made.out, "marian", tmp_path / "tuned"
    )
    assert "operators-fixed" in message_codes(tuned.warnings)
    assert "tune" not in tuned.details
    for name, graph in left.details["graphs"].items():
        assert tuned.details["graphs"][name]["operators"] == graph["operators"]


def test_a_layer_begins_from_what_binary_layers_feed_it(tmp_path):
    """As in the published code, where the first forward pass begins them one after the other."""
    source = tiny.as_artifact(coded(tmp_path / "coded"), TASK)
    ctx = harness.make_context(tmp_path / "out", TASK, ROWS)
    model, edits = load_trainable(source, ctx)
    insert_binary_inputs(model, edits, source, FinetuneSettings(**BITS), ctx, "finetune")
    layers = inputs_of(model)
    places = {e["module"]: e["signed"] for e in edits if e["op"] == "binary_inputs"}
    assert places == {name: layer.signed for name, layer in layers.items()}
    fed: dict[str, torch.Tensor] = {}
    rows = load_calibration_samples(model, source, 32, ctx, "finetune", padded=True)
    with input_hooks(
        model, {n: [m] for n, m in layers.items()}, lambda n, x: fed.update({n: x}), rows.batches[0]
    ):
        list(model_outputs(model, rows.batches[:1]))
    assert len(fed) == len(layers) == 13
    for name, x in fed.items():
        assert float(layers[name].scale.detach()) == pytest.approx(2 * float(x.abs().mean()), rel=1e-4), name
        assert len(layers[name].coded.weight.unique()) > 2  # float weights are behind the codes


def test_what_no_row_reaches_is_said(tmp_path, monkeypatch):
    source = tiny.as_artifact(coded(tmp_path / "coded"), TASK)
    ctx = harness.make_context(tmp_path / "out", TASK, ROWS)
    model, edits = load_trainable(source, ctx)
    monkeypatch.setattr(model.bert.pooler, "forward", lambda states: states[:, 0])
    insert_binary_inputs(model, edits, source, FinetuneSettings(**BITS), ctx, "finetune")
    (told,) = ctx.warnings
    assert told.code == "uncalibrated-layers"
    assert "(bert.pooler.dense)" in told.message


def test_scale_and_shift_learn_in_parts_of_the_first_scale():
    """Each has its layer's rate, and no decay: one of AdamW's steps is that long, however small a slope."""
    model = torch.nn.ModuleDict()
    for name, scale in (("small", 0.01), ("large", 3.0)):
        model[name] = BinaryInputs(quantize_module(torch.nn.Linear(32, 8), "binary"), True)
        model[name].scale.data.fill_(scale)
    learned = BinaryInputTraining(model, QatSettings(activations="one-bit", learning_rate=0.1))
    groups = learned.extension().groups
    optimizer = torch.optim.AdamW([{"params": g.parameters, **g.optimizer_options()} for g in groups])
    sum(m(torch.randn(4, 32) * m.scale.detach()).square().sum() for m in model.values()).backward()
    optimizer.step()
    for name, scale in (("small", 0.01), ("large", 3.0)):
        assert abs(float(model[name].scale.detach()) - scale) == pytest.approx(0.1 * scale, rel=1e-2)
        assert float(model[name].shift.detach().abs().max()) == pytest.approx(0.1 * scale, rel=1e-2)
    ctx = harness.make_context(Path("."))
    learned.finalize(ctx)
    assert ctx.details["binary_activations"]["mean_change"] == pytest.approx(0.1, abs=0.01)
    assert BinaryInputTraining(model, None).rate == QatSettings().learning_rate


def test_a_teacher_teaches_it_phase_by_phase_and_layers_that_were_split(tmp_path):
    """Ternary layers become two binary ones each, and either is fed two values of its own."""
    source = every_family.model_with_layers("bert", 2)
    ternary = coded(tmp_path / "coded", "bert", scheme="ternary")
    settings = {**TRAIN, "qat": {"weight_splitting": True, "activations": "one-bit"}}
    phases = [{"losses": {"hidden_states": 1.0}}, {"losses": {"logits": 1.0}}]
    made = DistillSettings(**settings, phases=phases)
    teacher = {"ancestors": {"model": tiny.as_artifact(source, TASK)}}
    ctx = harness.run_stage(Distill(), made, ternary, tmp_path / "out", TASK, ROWS, **teacher)
    layers = inputs_of(harness.load_output_model(ctx))
    assert len(layers) == 2 * ctx.details["split_layers"] == ctx.details["binary_activations"]["begun"]
    assert {name.rpartition(".")[2] for name in layers} == {"first", "second"}
    every_family.run_stage(Onnx(), OnnxSettings(generation_graph=False), ctx.out, "bert", tmp_path / "onnx")


def test_layers_in_several_places_stay_one(tmp_path):
    shared = every_family.run_stage(
        ShareWeights(), ShareWeightsSettings(groups=1), every_family.model_with_layers("bert", 2), "bert",
        tmp_path / "shared",
    )  # fmt: skip
    ctx = trained("bert", coded(tmp_path / "coded", "bert", shared.out), tmp_path / "out", **BITS)
    model = harness.load_output_model(ctx)
    first, second = model.bert.encoder.layer
    assert first.output.dense is second.output.dense
    assert isinstance(first.output.dense, BinaryInputs)
    assert ctx.details["binary_activations"]["layers"] == 7


def test_adapters_train_behind_it_and_leave(tmp_path):
    """They are fed the two values too: what is beside the codes stays."""
    binary = trained("bert", coded(tmp_path / "coded"), tmp_path / "binary", **BITS)
    ctx = trained("bert", binary.out, tmp_path / "out", lora={"rank": 2, "alpha": 4})
    assert "binary_activations" not in ctx.details
    before, after = (load_file(made.out / "model.safetensors") for made in (binary, ctx))
    kept = [name for name in before if name.endswith((".scale", ".shift"))]
    assert len(kept) == 26
    assert all(after[name].equal(before[name]) for name in kept)
    model = harness.load_output_model(ctx)
    assert isinstance(model.bert.encoder.layer[0].output.dense.coded, LowRankCorrectedLinear)
    floats = sum(p.numel() for n, p in model.named_parameters() if ".matrix." not in n)
    codes = {m.matrix for m in model.modules() if is_quantized(m)}
    assert count_parameters(ctx.out) == floats + sum(len(m.codes) * m.width for m in codes)
    every_family.run_stage(Onnx(), OnnxSettings(generation_graph=False), ctx.out, "bert", tmp_path / "onnx")


def test_images_too(tmp_path):
    rows = images.read_rows(images.write_rows(tmp_path / "rows.jsonl"))
    made = harness.run_stage(
        Quantize(),
        QuantizeSettings(**BINARY),
        images.write_model(tmp_path / "model"),
        tmp_path / "coded",
        images.TASK,
    )
    ctx = harness.run_stage(
        Finetune(), FinetuneSettings(**TRAIN | BITS), made.out, tmp_path / "out", images.TASK, rows
    )
    assert ctx.details["binary_activations"]["layers"] == len(inputs_of(harness.load_output_model(ctx))) >= 8


def test_a_model_of_16_bits_keeps_its_type(tmp_path):
    model, edits = load_model(every_family.model_with_layers("bert", 2))
    half = tmp_path / "half"
    half.mkdir()
    save_model(model, edits, half, every_family.model_with_layers("bert", 2), "fp16")
    ctx = trained("bert", coded(tmp_path / "coded", "bert", half), tmp_path / "out", **BITS)
    stored = load_file(ctx.out / "model.safetensors")
    assert {stored[name].dtype for name in stored if name.endswith((".scale", ".shift"))} == {torch.float16}
    every_family.run_stage(Onnx(), OnnxSettings(generation_graph=False), ctx.out, "bert", tmp_path / "onnx")


def test_what_cannot_be_is_refused(tmp_path):
    def refuses(source, code):
        with raises_code(code, InputError) as caught:
            trained("bert", source, tmp_path / f"{source.name}-{code}", **BITS)
        assert caught.value.setting == "qat.activations"

    refuses(coded(tmp_path / "int4", scheme="int4"), "no-layer-of-scheme")
    refuses(every_family.model_with_layers("bert", 1), "no-layer-of-scheme")
    refuses(coded(tmp_path / "pair", low_rank_correction={"rank": 2}), "has-low-rank-correction")
    with raises_setting_codes("unused-setting"):
        QatSettings(learning_rate=0.1)


def test_training_makes_up_for_some_of_it(tmp_path):
    """A whole run, from the recipe to the graph: what has two values loses much, and training helps."""
    tiny.write_bert(tmp_path / "model")
    tiny.write_labelled(tmp_path / "rows.jsonl")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    smelt.run(tmp_path / "recipe.yaml", out=tmp_path / "run")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    steps = {step["name"]: step for step in report["steps"]}
    assert {name: step["status"] for name, step in steps.items()} == dict.fromkeys(steps, "done")
    assert "one-bit-inputs" in [told["code"] for told in report["warnings"]]
    details = steps["both"]["details"]
    assert details["binary_activations"]["speed_gained"].startswith("none")
    losses = [one["loss"] for one in details["training"]["validations"]]
    assert min(losses[1:]) < losses[0]
