"""`smelt init`: a recipe that plans, for every family and task, and says what was seen."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from smelt.core.errors import InputError, did_you_mean
from smelt.core.messages import message_codes
from smelt.models.families.registry import FAMILIES
from smelt.pipeline.inspect import machine
from smelt.pipeline.inspect.data_files import inspect_data
from smelt.pipeline.inspect.init_recipe import (
    InitOptions,
    MachineInfo,
    init_recipe,
    recipe_text,
)
from smelt.pipeline.inspect.model_info import inspect_model
from smelt.pipeline.plan.load_plan import load_plan
from smelt.pipeline.recipe.yaml_file import parse_yaml, yaml_scalar
from tests.support.models import causal, embedders, init_models, masked, questions, taggers, tiny


@pytest.fixture(scope="module")
def models():
    return init_models.make_models()


_GPU = MachineInfo(cores=4, gpu=True, tensorrt=True)


def _data(folder, task):
    folder.mkdir(exist_ok=True)
    for split in ("train", "dev", "test"):
        if task in ("language-modeling", masked.TASK):
            (folder / f"{split}.txt").write_text("\n".join(tiny.SENTENCES * 3))
        else:
            others = {
                "text-classification": tiny.write_labeled,
                "text-generation": causal.write_prompts,
                embedders.TASK: embedders.write_rows,
                taggers.TASK: taggers.write_entities,
                questions.TASK: questions.write_questions,
            }
            write = others.get(task, tiny.write_pairs)
            write(folder / f"my-{split}.jsonl", 8)
    return folder


def stages(plan):
    """Return the stages of a plan but the step that is there only where OpenVINO is."""
    return [step.stage for step in plan.steps if step.name != "openvino"]


@pytest.mark.parametrize(("family", "task"), init_models.FAMILY_TASKS)
def test_init_recipe_plans_for_every_family_and_task(tmp_path, models, monkeypatch, family, task):
    data = _data(tmp_path / "rows", task)
    monkeypatch.chdir(tmp_path)
    text, path = init_recipe(str(init_models.model_for(models, family, task)), [data], "r.yaml", task)
    assert path is not None
    assert (
        max(len(line) for line in text.splitlines() if str(tmp_path) not in line and "model:" not in line)
        <= 80
    )
    assert " parameters in float32" in text
    assert "0.0M" not in text
    plan = load_plan(path)
    assert plan.recipe.task == task
    assert set(plan.recipe.data.split_sources()) == {"train", "validation", "test"}
    classifies = task in ("text-classification", taggers.TASK, questions.TASK)
    recovers = [] if classifies else ["distill"]  # so few rows give a classifier nothing
    assert stages(plan) == ["prune", *recovers, "onnx", "quantize", "onnx", "quantize", "onnx"]
    assert plan.step("onnx-int8").parent == "int8"
    assert {*message_codes(plan.warnings)} <= {"few-test-rows", "test-rows-in-other-split"}


@pytest.mark.parametrize(
    "machine", [MachineInfo(2, False, False), MachineInfo(2, True, False), _GPU], ids=str
)
def test_init_recipe_plans_on_every_machine(tmp_path, models, monkeypatch, machine):
    monkeypatch.setattr("smelt.pipeline.inspect.init_recipe.inspect_machine", lambda: machine)
    plan = init_models.plan_recipe(
        models["bert"], [_data(tmp_path / "rows", "text-classification")], tmp_path / "r.yaml"
    )
    assert ("tensorrt" in [step.stage for step in plan.steps]) == machine.gpu


@pytest.mark.parametrize(("family", "task", "calibrated"), [
    ("bert", "text-classification", "int8-static"), ("marian", "translation", "int4"),
    ("llama", "language-modeling", "int4"),
])  # fmt: skip
@pytest.mark.parametrize("with_calibration", [False, True])
def test_model_without_training_samples_is_only_quantized(
    tmp_path, models, family, task, calibrated, with_calibration
):
    folder = _data(tmp_path / "rows", task)
    [test] = folder.glob("*test*")
    files = [test]
    if with_calibration:
        files.append(test.with_name(f"unlabeled{test.suffix}"))
        samples = test.read_text()
        if task == "text-classification":
            rows = (json.loads(line) for line in samples.splitlines())
            samples = "".join(json.dumps({"text": row["text"]}) + "\n" for row in rows)
        files[1].write_text(samples)
    _, path = init_recipe(str(models[family]), files, str(tmp_path / "r.yaml"), task)
    assert path is not None
    plan = load_plan(path)
    assert stages(plan) == ["onnx", "quantize", "onnx", "quantize", "onnx"]
    artifacts = [(step.parent, step.stage, step.settings.model_dump_json()) for step in plan.steps]
    assert len(set(artifacts)) == len(artifacts)  # none is built and scored twice
    [few_bits] = [step for step in plan.steps if step.name in ("int4", "int8-static")]
    reads = "calibration" in few_bits.needs
    assert (few_bits.name, reads) == (calibrated if with_calibration else "int4", with_calibration)
    assert {plan.step(name).parent for name in ("onnx-fp32", "int8", few_bits.name)} == {"model"}


@pytest.mark.parametrize(("family", "task"), [
    ("bert", "text-classification"), ("marian", "translation"), ("llama", "language-modeling"),
])  # fmt: skip
@pytest.mark.parametrize(("files", "expected"), [
    (("train", "dev", "test"), "int8-static"), (("unlabeled", "test"), "int8-static"),
    (("test",), "int8-groupwise"),
])  # fmt: skip
def test_recipe_to_serve_has_no_ranges_of_a_batch(tmp_path, models, family, task, files, expected):
    folder = _data(tmp_path / "rows", task)
    [test] = folder.glob("*test*")
    if "unlabeled" in files:
        test.with_name(f"unlabeled{test.suffix}").write_text(test.read_text())
    data = [path for path in folder.iterdir() if any(name in path.name for name in files)]
    options = InitOptions(task, serve=True)
    _, path = init_recipe(str(models[family]), data, str(tmp_path / "r.yaml"), task, options=options)
    plan = load_plan(path)
    schemes = {step.name: step.settings.scheme for step in plan.steps if step.stage == "quantize"}
    assert schemes.pop("int8") == expected
    assert "int8-dynamic" not in schemes.values()
    artifacts = [(step.parent, step.stage, step.settings.model_dump_json()) for step in plan.steps]
    assert len(set(artifacts)) == len(artifacts)  # none is built and scored twice


def test_classifier_is_calibrated_on_plain_text(tmp_path, models):
    [test] = _data(tmp_path / "rows", "text-classification").glob("*test*")
    texts = tmp_path / "unlabeled.txt"
    texts.write_text("\n".join(tiny.SENTENCES))
    _, path = init_recipe(str(models["bert"]), [test, texts], str(tmp_path / "r.yaml"), "text-classification")
    plan = load_plan(path)
    assert plan.step("int8-static").needs >= {"calibration"}
    calibration = plan.splits["calibration"].examples
    assert [example.text for example in calibration] == list(tiny.SENTENCES)


def test_gpu_adds_tensorrt_branch(tmp_path, models, monkeypatch):
    data = inspect_data([_data(tmp_path / "rows", "translation")], "translation")
    path = tmp_path / "r.yaml"
    path.write_text(
        recipe_text(str(models["t5"]), inspect_model(str(models["t5"])), data, _GPU, tmp_path, path)
    )
    steps = load_plan(path).steps
    assert [s.stage for s in steps][-2:] == ["onnx", "tensorrt"]
    assert steps[-1].optional
    assert "4 cores and an NVIDIA GPU, with TensorRT." in " ".join(
        path.read_text().replace("\n# ", " ").split()
    )


@pytest.mark.parametrize("works", [True, False])
def test_ort_tensorrt_is_proposed_only_if_it_works(tmp_path, models, works):
    data = inspect_data([_data(tmp_path / "rows", "translation")], "translation")
    path = tmp_path / "r.yaml"
    machine = MachineInfo(cores=4, gpu=True, tensorrt=False, ort_tensorrt=works)
    path.write_text(
        recipe_text(str(models["t5"]), inspect_model(str(models["t5"])), data, machine, tmp_path, path)
    )
    steps = load_plan(path).steps
    targets = [step.settings.target for step in steps if step.stage == "onnx"]
    assert ("ort-tensorrt" in targets) == works
    assert not works or steps[-1].optional


@pytest.mark.parametrize("there", [True, False])
def test_openvino_is_proposed_if_installed(tmp_path, models, there):
    data = inspect_data([_data(tmp_path / "rows", "translation")], "translation")
    path = tmp_path / "r.yaml"
    machine = MachineInfo(2, False, False, openvino=there)
    path.write_text(
        recipe_text(
            str(models["marian"]), inspect_model(str(models["marian"])), data, machine, tmp_path, path
        )
    )
    steps = {step.name: step for step in load_plan(path).steps}
    assert ("openvino" in steps) == there
    text = "on 2 cores without an NVIDIA GPU" + (", with OpenVINO." if there else ".")
    assert text in " ".join(path.read_text().replace("\n# ", " ").split())
    if there:
        assert steps["openvino"].optional
        assert steps["openvino"].parent == steps["onnx-fp32"].parent == "small"
        assert steps["int8"].parent == "small"


def test_bare_encoder_is_finetuned_first_and_is_teacher(tmp_path):
    from transformers import BertConfig, BertModel

    folder = tiny.write_bert(tmp_path / "m")
    config = BertConfig.from_pretrained(folder)
    BertModel(config).save_pretrained(folder)
    _, path = init_recipe(
        str(folder), [_data(tmp_path / "d", "text-classification")], str(tmp_path / "r.yaml")
    )
    assert path is not None
    plan = load_plan(path)
    assert plan.recipe.baseline == plan.steps[0].name == "tuned"
    assert plan.step("small").stage == "prune"  # of few rows there is nothing to recover


def test_pruned_classifier_is_distilled_with_enough_samples(tmp_path, models):
    def rows(count):
        lines = (json.dumps({"text": f"text {i}", "label": i % 2}) for i in range(count))
        (tmp_path / "train.jsonl").write_text("\n".join(lines))
        _, path = init_recipe(
            str(models["bare"]), [tmp_path / "train.jsonl"], str(tmp_path / "r.yaml"), force=True
        )
        return load_plan(path)

    assert rows(6_300).step("small").settings.step_references() == {
        "teacher": "tuned"
    }  # four fifths are train
    assert rows(6_200).step("small").stage == "prune"


@pytest.mark.parametrize(("row", "task"), [
    ({"text": "a", "label": 1}, "text-classification"),
    ({"sentence": "a", "label": "good"}, "text-classification"),
    ({"text": "a", "text_pair": "b", "label": "contradiction"}, "text-classification"),
    ({"text": "a", "text_pair": "b", "label": 0.5}, "sentence-similarity"),
    ({"text": "a"}, "sentence-similarity"),
])  # fmt: skip
def test_labeled_texts_make_any_encoder_a_classifier(tmp_path, models, row, task):
    data = tmp_path / "train.jsonl"
    rows = [row | {"text" if "text" in row else "sentence": f"text {i}"} for i in range(40)]
    if "label" in row and isinstance(row["label"], str):
        rows = [row_data | {"label": f"{row_data['label']} {i % 2}"} for i, row_data in enumerate(rows)]
    elif row.get("label") == 1:
        rows = [row_data | {"label": i % 2} for i, row_data in enumerate(rows)]
    data.write_text("".join(json.dumps(row_data) + "\n" for row_data in rows))
    model = models["bert-embedder"]
    _, path = init_recipe(str(model), [data], str(tmp_path / "r.yaml"))
    recipe = load_plan(path).recipe
    assert recipe.task == task


def test_paths_are_written_as_given(tmp_path, models, monkeypatch):
    (tmp_path / "here" / "deep").mkdir(parents=True)
    shutil.copytree(models["marian"], tmp_path / "here" / "m")
    data = tmp_path / "here" / "train.jsonl"
    data.write_text("".join(f'{{"source": "a {i}", "target": "b {i}"}}\n' for i in range(40)))
    monkeypatch.chdir(tmp_path / "here")
    absolute, _ = init_recipe(str(tmp_path / "here" / "m"), [data], "deep/r.yaml")
    assert f"model: {tmp_path}/here/m\n" in absolute
    assert f"train: {data}\n" in absolute
    relative, _ = init_recipe("m", [Path("train.jsonl")], "deep/r.yaml", force=True)
    assert "model: ../m\n" in relative
    assert "train: ../train.jsonl\n" in relative


@pytest.mark.parametrize(
    "layout", ["{}.jsonl", "data/{}.jsonl", "{}/rows.jsonl", "data/{}-00000-of-00001.jsonl"]
)
def test_data_folder_is_split_by_file_names(tmp_path, models, layout):
    for split in ("train", "validation", "test"):
        path = tmp_path / "d" / layout.format(split)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f'{{"source": "{split} {i}", "target": "b {i}"}}\n' for i in range(9)))
    _, path = init_recipe(str(models["marian"]), [tmp_path / "d"], str(tmp_path / "r.yaml"))
    files = load_plan(path).recipe.data.split_files()
    assert {name: str(file) for name, file in files.items() if file} == {
        split: str(tmp_path / "d" / layout.format(split)) for split in ("train", "validation", "test")
    }


@pytest.mark.parametrize(
    "text", ["data/a b.jsonl", "1", "yes: no", "true", "a#b", "[x]", "ü.csv", "null", "-"]
)
def test_yaml_scalar_round_trips_any_name(text):
    assert parse_yaml(f"x: {yaml_scalar(text)}", "").value == {"x": text}
    assert parse_yaml(f"x: {{y: {yaml_scalar(text)}}}", "").value == {"x": {"y": text}}


def test_machine_is_inspected_without_torch(monkeypatch):
    from smelt.pipeline.inspect.init_recipe import inspect_machine

    monkeypatch.setattr(machine, "has_cuda", lambda: True)
    assert inspect_machine().gpu
    assert inspect_machine().cores >= 1
    assert inspect_machine().openvino == (importlib.util.find_spec("openvino") is not None)


def test_init_recipe_runs_unchanged(tmp_path, models, monkeypatch):
    import smelt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("smelt.pipeline.inspect.init_stages._MIN_DISTILL_ROWS", 1)
    init_recipe(str(models["bert"]), [_data(tmp_path / "rows", "text-classification")], "r.yaml")
    changes = {"score.latency": False, "small.max_steps": 1, "threads": 1}  # only to be quick
    result = smelt.run("r.yaml", overrides=changes, until="onnx-int8", out="run", quiet=True)
    steps = {step["name"]: step for step in result.report["steps"]}
    assert result.exit_code == 0, result.report
    assert {step["status"] for step in steps.values()} == {"done"}


@pytest.mark.parametrize("kind", ["roformer", "gemma3", "umt5", "llava"])
def test_unknown_family_is_reported_without_suggesting_unrelated_one(tmp_path, models, kind):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(InputError) as raised:
        inspect_model(str(folder))
    text = str(raised.value)
    assert raised.value.code == "unsupported-family"
    assert f"'{kind}'" in text
    assert [name for name in FAMILIES if name not in text] == []
    near = did_you_mean(kind, FAMILIES)
    assert not near or near not in text


def test_bf16_graph_for_gpu_is_exported_but_not_scored_without_gpu(monkeypatch):
    monkeypatch.setattr(machine, "has_cuda", lambda: False)
    assert "needs ONNX Runtime on CUDA" in machine.unscored_reason("onnx", "ort-cuda", "bf16")
    assert "the engine built from it is scored" in machine.unscored_reason("onnx", "tensorrt", "bf16")
    assert machine.unscored_reason("onnx", "tensorrt", "fp16") is None
    assert machine.unscored_reason("onnx", "openvino", "bf16") is None
