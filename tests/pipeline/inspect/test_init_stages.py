"""`smelt init --fast`: for every family and task a chain that plans, with fewer layers than the model."""

from dataclasses import replace

import pytest

import smelt
from smelt.data.tasks import tasks_with
from smelt.pipeline.inspect import init_recipe as init_recipe_module
from smelt.pipeline.inspect import init_stages
from smelt.pipeline.inspect.init_recipe import InitOptions, init_recipe
from smelt.pipeline.inspect.init_stages import (
    MIN_SHORTLIST_ROWS,
    MachineInfo,
    ProposedStep,
    layer_counts,
    propose_steps,
    step_lines,
)
from smelt.pipeline.inspect.model_info import inspect_model
from smelt.pipeline.plan.load_plan import load_plan
from smelt.pipeline.recipe.yaml_file import parse_yaml
from tests.support.models import causal, embedders, images, init_models, masked, questions, taggers, tiny

# half of the layers, half of the neurons, one training
NARROW = ["drop-layers", "prune", "distill", "onnx", "quantize", "onnx"]
ALONE = ["openvino", "int8-alone", "onnx-int8-alone"]


@pytest.fixture(scope="module")
def models():
    return init_models.make_models()


def rows(folder, task):
    folder.mkdir(exist_ok=True)
    if task in ("language-modeling", masked.TASK):
        (folder / "train.txt").write_text("\n".join(tiny.SENTENCES * 40))
    else:
        others = {
            "text-classification": tiny.write_labeled,
            "text-generation": causal.write_prompts,
            embedders.TASK: embedders.write_rows,
            taggers.TASK: taggers.write_entities,
            questions.TASK: questions.write_questions,
        }
        write = others.get(task, tiny.write_pairs)
        write(folder / "train.jsonl", 40)
    return folder


def fast(model, data, path, task):
    return init_recipe(str(model), [data], str(path), task, options=InitOptions(task, fast=True))


@pytest.mark.parametrize(("family", "task"), init_models.FAMILY_TASKS)
def test_fast_recipe_plans_for_every_family_and_task(tmp_path, models, monkeypatch, family, task):
    monkeypatch.chdir(tmp_path)
    model = init_models.model_for(models, family, task)
    text, path = fast(model, rows(tmp_path / "rows", task), "r.yaml", task)
    assert (
        max(len(line) for line in text.splitlines() if str(tmp_path) not in line and "model:" not in line)
        <= 80
    )
    plan = load_plan(path)
    assert not plan.blocked_steps
    counts = layer_counts(inspect_model(str(model), task))
    if task in ("text-classification", taggers.TASK, questions.TASK):
        (count,) = counts.values()
        stages = [step.stage for step in plan.steps if step.name not in ALONE]
        assert stages[-len(NARROW) :] == NARROW if count > 1 else stages[-len(NARROW) + 1 :] == NARROW[1:]
        assert plan.step("small").settings.losses.labels == 0
        return
    if task in ("language-modeling", "text-generation"):
        stages = [step.stage for step in plan.steps]
        (count,) = counts.values()
        assert stages[: stages.index("onnx")] == [*["drop-layers"] * (count > 1), "prune", "distill"]
        return
    shallow = (
        "small" if task in tasks_with(output="text") else "shallow"
    )  # 40 rows are too few for a list of words
    student = plan.step(shallow).settings.student
    assert (student.decoder_layers or student.layers) == max(1, round(list(counts.values())[-1] / 3))  # of 2
    uses_labels = task in (embedders.TASK, masked.TASK)
    assert plan.step(shallow).settings.losses.labels in (0, None) or uses_labels
    if task in tasks_with(output="text"):
        metric = "bleu" if task == "translation" else "rougeL"
        assert (
            plan.step("small").settings.metric_for_best_model,
            plan.step("small").settings.lr_scheduler_type,
        ) == (metric, "cosine")


@pytest.mark.parametrize(
    ("rows", "last"), [(MIN_SHORTLIST_ROWS, "shortlist"), (MIN_SHORTLIST_ROWS - 1, "distill")]
)
def test_shortlist_is_proposed_only_with_enough_samples(models, rows, last):
    info = inspect_model(str(models["marian"]), "translation")
    stages = {
        step.name: step.stage for step in propose_steps(info, MachineInfo(1, False, False), True, True, rows)
    }
    assert stages["small"] == last


def test_shortlist_threshold_counts_training_samples(tmp_path, models, monkeypatch):
    monkeypatch.setattr(init_stages, "MIN_SHORTLIST_ROWS", 50)
    monkeypatch.setattr(init_recipe_module, "MIN_SHORTLIST_ROWS", 50)
    for count, stages in ((62, ()), (63, ("shortlist",))):  # of which a fifth is validation and test
        tiny.write_pairs(tmp_path / "train.jsonl", count)
        _, path = fast(models["marian"], tmp_path / "train.jsonl", tmp_path / f"{count}.yaml", "translation")
        assert tuple(s.stage for s in load_plan(path).steps if s.stage == "shortlist") == stages


@pytest.mark.parametrize("as_fast_as_it_gets", [True, False])
def test_recipe_with_training_also_quantizes_unpruned_model(models, as_fast_as_it_gets):
    info = inspect_model(str(models["marian"]), "translation")
    steps = {
        step.name: step
        for step in propose_steps(info, MachineInfo(1, False, False), True, as_fast_as_it_gets)
    }
    assert (steps["int8-alone"].stage, steps["int8-alone"].parent) == ("quantize", "model")
    assert steps["onnx-int8-alone"].stage == "onnx"


@pytest.mark.parametrize(
    ("family", "task", "is_fast", "serve", "expected"),
    [
        ("marian", "translation", True, False, "tensor"),
        ("marian", "translation", False, False, None),
        ("marian", "translation", True, True, None),  # another scheme
        ("bert", "text-classification", True, False, None),
        ("llama", "language-modeling", True, False, None),
    ],
)
def test_fast_recipe_of_translator_also_tries_one_scale_per_matrix(
    tmp_path, models, family, task, is_fast, serve, expected
):
    model = init_models.model_for(models, family, task)
    options = InitOptions(task, fast=is_fast, serve=serve)
    _, path = init_recipe(
        str(model), [rows(tmp_path / "rows", task)], str(tmp_path / "r.yaml"), task, options=options
    )
    plan = load_plan(path)
    branches = {step.name: step for step in plan.steps}
    assert ("onnx-int8-tensor" in branches) == (expected is not None)
    if expected:
        per_tensor, per_channel = branches["int8-tensor"], branches["int8"]
        assert per_tensor.parent == per_channel.parent
        options = per_channel.settings.scheme_options("int8-dynamic")
        assert per_tensor.settings.scheme_options("int8-dynamic") == options | {"granularity": expected}


@pytest.mark.parametrize(
    ("count", "expected"), [(1, []), (2, [1]), (3, [2]), (5, [4]), (12, [10]), (32, [26])]
)
def test_language_model_keeps_four_of_five_layers(models, count, expected):
    info = inspect_model(str(models["llama"]), "language-modeling")
    info = replace(info, config=info.config | {"num_hidden_layers": count})
    drop_steps = [
        step
        for step in propose_steps(info, MachineInfo(1, False, False), True, True)
        if step.stage == "drop-layers"
    ]
    assert [step.settings for step in drop_steps] == [f"{{layers: {layers}}}" for layers in expected]


@pytest.mark.parametrize(
    ("family", "task", "labels"),
    [("llama", "language-modeling", 0), ("t5", "summarization", 0), ("bert", "text-classification", 0.5)],
)
def test_text_distillation_learns_from_teacher_only(tmp_path, models, monkeypatch, family, task, labels):
    monkeypatch.setattr(init_stages, "_MIN_DISTILL_ROWS", 1)
    model = init_models.model_for(models, family, task)
    _, path = init_recipe(str(model), [rows(tmp_path / "rows", task)], str(tmp_path / "r.yaml"), task)
    settings = load_plan(path).step("small").settings
    assert settings.losses.labels == labels
    assert settings.temperature == 1.0


@pytest.mark.parametrize(
    ("count", "expected"), [(1, None), (2, "{layers: 1}"), (6, "{layers: 3}"), (12, "{layers: 6}")]
)
def test_classifier_keeps_half_of_its_layers(models, count, expected):
    info = inspect_model(str(models["bert"]), "text-classification")
    info = replace(info, config=info.config | {"num_hidden_layers": count})
    steps = list(propose_steps(info, MachineInfo(1, False, False), True, True))
    assert next((step.settings for step in steps if step.stage == "drop-layers"), None) == expected
    behind = [step.stage for step in steps].index("prune")
    assert [step.stage for step in steps[behind:]][: len(NARROW) - 1] == NARROW[1:]


def test_init_stages_for_image_models(tmp_path):
    for kind in ("vit", "resnet", "convnext", "mobilenet_v2", "efficientnet"):
        images.write_model(tmp_path / kind, kind)
    images.write_class_folders(tmp_path / "rows" / "train")
    stages = {}
    for kind in ("vit", "resnet", "convnext", "mobilenet_v2", "efficientnet"):
        _, path = fast(tmp_path / kind, tmp_path / "rows", tmp_path / f"{kind}.yaml", images.TASK)
        stages[kind] = [step.stage for step in load_plan(path).steps if step.name not in ALONE]
    assert stages["vit"] == NARROW
    assert stages["resnet"] == stages["convnext"] == ["factorize", "distill", "onnx"]
    # depthwise convolutions are not factorized
    assert stages["mobilenet_v2"] == stages["efficientnet"] == ["quantize", "onnx"]


def test_nothing_is_distilled_without_training_samples(tmp_path, models):
    tiny.write_pairs(tmp_path / "test.jsonl", 8)
    _, path = fast(models["marian"], tmp_path / "test.jsonl", tmp_path / "r.yaml", "translation")
    assert "distill" not in [step.stage for step in load_plan(path).steps]


def test_fast_recipe_runs_unchanged(tmp_path, models, monkeypatch):  # a classifier: test_init_recipe.py
    family, task = "gpt2", "text-generation"
    monkeypatch.chdir(tmp_path)
    fast(models[family], rows(tmp_path / "rows", task), "r.yaml", task)
    changes = {"score.latency": False, "threads": 1}  # only to be quick
    changes |= {"small.max_steps": 1}
    result = smelt.run("r.yaml", overrides=changes, until="onnx-int8", out="run", quiet=True)
    steps = {step["name"]: step for step in result.report["steps"]}
    assert result.exit_code == 0, result.report
    assert {step["status"] for step in steps.values()} == {"done"}
    assert steps["small"]["parameters"] < steps["model"]["parameters"]


def test_stack_without_layer_count_in_config_counts_as_one(models):
    info = inspect_model(str(models["llama"]), "language-modeling")
    assert layer_counts(info) == {"layers": info.config["num_hidden_layers"]}
    assert layer_counts(replace(info, config={})) == {"layers": 1}


def test_long_settings_are_wrapped_over_several_lines():
    settings = "{student: {decoder_layers: 1}, layer_map: [a, b, {c: 1, d: [2, 3]}], losses: {logits: 1.0}}"
    for reason in ("", "a reason"):
        lines = list(step_lines(ProposedStep("distill", settings, reason, "x")))
        (step,) = parse_yaml("stages:\n" + "\n".join(lines), "r").value["stages"]
        assert step == {"distill": parse_yaml(f"a: {settings}", "r").value["a"], "name": "x"}
        assert len(lines) == 5 + bool(reason)
