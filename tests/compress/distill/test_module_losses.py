"""Losses on modules that are paired by name: their value, projections, names that a model lacks."""

import pytest
import torch
from torch import nn

import smelt
from smelt.compress.distill.objective import DistillObjective, make_inner_losses
from smelt.compress.distill.settings import DistillSettings
from smelt.core.errors import InputError
from smelt.models.checkpoint import load_model
from smelt.models.edits import replace_module
from smelt.pipeline.plan.load_plan import load_plan
from tests.support.expected_errors import message_locations, raises_code, raises_setting_codes
from tests.support.models import text_modules, user_modules

PAIRS = {"network.stem": "network.stem", "network.blocks.2": "network.blocks.0"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def settings(layer_map, **more):
    losses = {"logits": 0, "labels": 0, "hidden_states": 2.0}
    return DistillSettings.model_validate({"losses": losses, "layer_map": layer_map} | more)


@pytest.fixture
def models(tmp_path):
    """A student, a teacher with other weights, and the folder of both."""
    folder = user_modules.model_folder(tmp_path / "own", "cnn")
    student, teacher = load_model(folder)[0], load_model(folder)[0]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return student, teacher, folder


def term(student, teacher, folder, chosen):
    """Return the value of the only loss term, the losses and the images."""
    pixels = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    inner = make_inner_losses(student, teacher, chosen, 3, folder)
    with torch.no_grad(), inner.capture():
        batch = {"pixel_values": pixels, "labels": torch.zeros(3, dtype=torch.long)}
        terms = DistillObjective(teacher, chosen, inner)(student, batch)
    (value,) = (float(each.value) for each in terms.values())
    return value, inner, pixels


def features(model, pixels):
    """Return the outputs of the stem and of the first block."""
    network = model.network
    stem = network.stem(pixels)
    return stem, network.blocks[0](stem)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@torch.no_grad()
def test_loss_is_mse_of_the_outputs_of_each_pair(models, reduction):
    student, teacher, folder = models
    pairs = {"network.stem": "network.stem", "network.blocks.0": "network.blocks.0"}
    value, inner, pixels = term(student, teacher, folder, settings(pairs, layer_reduction=reduction))
    distances = [
        nn.MSELoss()(a, b) for a, b in zip(features(student, pixels), features(teacher, pixels), strict=True)
    ]
    expected = 2.0 * float(sum(distances)) / (2 if reduction == "mean" else 1)
    assert expected > 1e-3
    assert value == pytest.approx(expected, rel=1e-5)
    assert inner.modules == {}


@torch.no_grad()
def test_outputs_are_captured_before_a_module_that_works_in_place(models):
    student, teacher, folder = models
    for model in (student, teacher):
        model.network.stem[2].inplace = True
    value, _, pixels = term(student, teacher, folder, settings({"network.stem.1": "network.stem.1"}))
    norms = [model.network.stem[:2](pixels) for model in (student, teacher)]
    assert float(norms[0].min()) < 0
    assert value == pytest.approx(2.0 * float(nn.MSELoss()(*norms)), rel=1e-5)


@torch.no_grad()
def test_narrower_student_is_projected_by_a_1x1_convolution(models):
    """As the regressor of FitNets; the student's stem has 4 of the teacher's 16 channels."""
    student, teacher, folder = models
    narrow = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 16, 1)).eval()
    replace_module(student, "network.stem", narrow)
    value, inner, pixels = term(student, teacher, folder, settings({"network.stem.0": "network.stem"}))
    (projection,) = inner.modules.values()
    weight = projection.linear.weight
    assert list(weight.shape) == [16, 4]
    projected = nn.functional.conv2d(narrow[0](pixels), weight[:, :, None, None])
    assert value == pytest.approx(
        2.0 * float(nn.MSELoss()(projected, features(teacher, pixels)[0])), rel=1e-5
    )


@pytest.mark.parametrize(("pairs", "code"), [
    ({"network.stem": "network.blocks.2"}, "shape-mismatch"),  # height and width
    ({"network.stem": "network.head"}, "shape-mismatch"),
    ({"network.stam": "network.stem"}, "unknown-module"),
    ({"network.stem": "network.blocks.9"}, "unknown-module"),
])  # fmt: skip
def test_modules_that_cannot_be_compared_are_refused_before_training(models, pairs, code):
    student, teacher, folder = models
    with raises_code(code, InputError) as refused:
        make_inner_losses(student, teacher, settings(pairs), 0, folder)
    assert refused.value.setting == "layer_map"


def test_module_that_is_called_twice_is_refused(models):
    student, teacher, folder = models
    student.network.blocks[2] = student.network.blocks[0]
    with raises_code("not-called-once", InputError):
        make_inner_losses(student, teacher, settings({"network.blocks.0": "network.stem"}), 0, folder)


@pytest.mark.parametrize("changes", [
    {"losses": {"cosine": 1.0, "hidden_states": 1.0}}, {"losses": {"attention": 1.0}},
])  # fmt: skip
def test_other_inner_losses_do_not_compare_named_modules(changes):
    with raises_setting_codes("settings-conflict"):
        settings(PAIRS, **changes)


@pytest.mark.parametrize(("layer_map", "code", "hint"), [
    ("{network.blocks.0: network.bloks.0}", "unknown-module", "network.blocks.0"),
    ("{network.stm: network.stem}", "unknown-module", "network.stem"),
    ("uniform", "does-not-fit-task", "hidden_states"),
])  # fmt: skip
def test_plan_refuses_unknown_modules_and_numbers_of_layers(tmp_path, layer_map, code, hint):
    user_modules.write_module(tmp_path, "cnn")
    stage = f"distill: {{losses: {{hidden_states: 1.0}}, layer_map: {layer_map}}}"
    with raises_code(code, InputError) as refused:
        load_plan(user_modules.write_recipe(tmp_path, "cnn", (stage,)))
    assert hint in str(refused.value)
    setting = "losses" if layer_map == "uniform" else "layer_map"
    assert {each[1] for each in message_locations(refused.value.messages)} == {f"stages[0].distill.{setting}"}


TEXT_PAIRS = {"network.embed": "network.embed", "network.convs.1": "network.convs.1"}


@torch.no_grad()
def test_loss_of_texts_is_mse_at_their_tokens(tmp_path):
    """embed returns [B, L, C], convs [B, C, L]; the second text is shorter by three tokens."""
    text_modules.write_module(tmp_path)
    folder = load_plan(text_modules.write_recipe(tmp_path)).local_model
    student, teacher = load_model(folder)[0], load_model(folder)[0]
    teacher.network.embed.weight.mul_(1.5)
    teacher.network.convs[1].weight.mul_(0.5)
    ids = torch.randint(5, 20, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.zeros(2, dtype=torch.long)}
    chosen = settings(TEXT_PAIRS)
    inner = make_inner_losses(student, teacher, chosen, 3, folder)
    with inner.capture():
        terms = DistillObjective(teacher, chosen, inner)(student, batch)
    outputs = []
    for network in (student.network, teacher.network):
        embedded = network.embed(ids)
        hidden = network.convs[1](embedded.transpose(1, 2).masked_fill(mask[:, None] == 0, 0))
        both = (embedded, hidden.transpose(1, 2))
        outputs.append([torch.cat([states[0], states[1, :4]]) for states in both])  # the tokens
    expected = 2.0 * sum(float(nn.MSELoss()(ours, theirs)) for ours, theirs in zip(*outputs, strict=True))
    assert expected > 1e-3
    assert float(terms["hidden_states"].value) == pytest.approx(expected, rel=1e-5)


def test_text_module_learns_hidden_states_by_name(tmp_path):
    text_modules.write_module(tmp_path)
    stage = (
        "distill: {losses: {logits: 1, labels: 0.5, hidden_states: 1.0}, max_steps: 2, num_evals: 1,"
        " layer_map: {network.convs.0: network.convs.0}}"
    )
    report = smelt.run(text_modules.write_recipe(tmp_path, stages=(stage,)), out=tmp_path / "run").report
    details = report["steps"][1]["details"]["training"]
    assert set(details["train_losses"]) == {"hidden_states", "labels", "logits"}


def test_numbers_of_layers_are_refused_in_a_text_module(tmp_path):
    text_modules.write_module(tmp_path)
    stage = "distill: {losses: {logits: 1, hidden_states: 1.0}}"
    with raises_code("does-not-fit-model", InputError) as refused:
        load_plan(text_modules.write_recipe(tmp_path, stages=(stage,)))
    assert "network." in str(refused.value)


def test_pruned_student_learns_hidden_states_of_the_dense_module(tmp_path):
    user_modules.write_module(tmp_path, "cnn")
    training = "max_steps: 40, batch_size: 8, num_evals: 1, precision: fp32, learning_rate: 0.02"
    losses = "losses: {logits: 0, labels: 0, hidden_states: 1.0}"
    recipe = user_modules.write_recipe(tmp_path, "cnn", (
        "prune: {targets: [channels], keep_ratio: 0.5, multiple_of: 4}",
        f"distill: {{{training}, {losses}, layer_map: {{network.stem: network.stem}}}}",
        "onnx",
    ))  # fmt: skip
    report = smelt.run(recipe, out=tmp_path / "run").report
    steps = {step["name"]: step for step in report["steps"]}
    assert {step["status"] for step in steps.values()} == {"done"}, report
    validations = [each["loss"] for each in steps["distill"]["details"]["training"]["validations"]]
    assert validations[-1] < 0.8 * validations[0]
    model, _ = load_model(tmp_path / "run" / "artifacts" / "distill")
    assert not any("projection" in name for name, _ in model.named_parameters())
