"""`smelt init`: a recipe that plans, for every family and task, and says what was seen."""

import json

import families
import pytest
import tiny
import untrained
from click.testing import CliRunner

from smelt import machine
from smelt.cli import main
from smelt.core.errors import InputError
from smelt.data_look import look_at_data
from smelt.init_recipe import Machine, _scalar, init_recipe, recipe_text
from smelt.model_folder import FAMILIES
from smelt.model_look import look
from smelt.plan import load_plan
from smelt.recipe_yaml import parse_yaml

CASES = [(family, task) for task, known in FAMILIES.items() for family in known if family != "mbart"]
_GPU = Machine(cores=4, gpu=True, tensorrt=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny model of every family."""
    made = {}
    for family in untrained.CONFIGS:
        labels = ["0", "1"] if untrained.CONFIGS[family][0] == "text-classification" else []
        made[family] = untrained.made(tmp_path_factory.mktemp(family), family, labels=labels)[0]
    return made


def _data(folder, task):
    folder.mkdir(exist_ok=True)
    for split in ("train", "dev", "test"):
        if task == "language-modeling":
            (folder / f"{split}.txt").write_text("\n".join(tiny.SENTENCES * 3))
        else:
            write = tiny.labelled if task == "text-classification" else tiny.pairs
            write(folder / f"my-{split}.jsonl", 8)
    return folder


@pytest.mark.parametrize(("family", "task"), CASES)
def test_a_recipe_plans_for_every_family_and_task(tmp_path, models, monkeypatch, family, task):
    data = _data(tmp_path / "rows", task)
    monkeypatch.chdir(tmp_path)
    text, path = init_recipe(str(models[family]), [data], "r.yaml", task)
    assert path is not None
    assert max(len(line) for line in text.splitlines() if not line.startswith("model:")) <= 80
    plan = load_plan(path)
    assert plan.recipe.task == task
    assert set(plan.recipe.data.splits()) == {"train", "validation", "test"}
    assert [step.stage for step in plan.steps] == ["prune", "distill", "onnx", "quantize", "onnx"]
    assert plan.step("onnx-int8").parent == "int8"
    assert all(text.startswith("test has 8 rows") or " test rows " in text for text in plan.warnings)


@pytest.mark.parametrize(("family", "task"), [("bert", "text-classification"), ("marian", "translation")])
def test_without_training_rows_nothing_is_trained(tmp_path, models, family, task):
    file = _data(tmp_path / "rows", task) / "my-test.jsonl"
    _, path = init_recipe(str(models[family]), [file], str(tmp_path / "r.yaml"))
    assert path is not None
    assert [step.stage for step in load_plan(path).steps] == ["factorize", "onnx", "quantize", "onnx"]


def test_a_gpu_gets_a_branch_for_tensorrt(tmp_path, models, monkeypatch):
    data = look_at_data([_data(tmp_path / "rows", "translation")], "translation")
    path = tmp_path / "r.yaml"
    path.write_text(recipe_text("m", look(str(models["t5"])), data, _GPU, tmp_path, path))
    steps = load_plan(path).steps
    assert [s.stage for s in steps][-2:] == ["onnx", "tensorrt"]
    assert steps[-1].optional
    assert "4 cores, an NVIDIA GPU and TensorRT" in " ".join(path.read_text().replace("\n# ", " ").split())


def test_a_bare_encoder_is_tuned_first_and_taught_by_that(tmp_path):
    from transformers import BertConfig, BertModel

    folder = tiny.bert(tmp_path / "m")
    config = BertConfig.from_pretrained(folder)
    BertModel(config).save_pretrained(folder)
    _, path = init_recipe(
        str(folder), [_data(tmp_path / "d", "text-classification")], str(tmp_path / "r.yaml")
    )
    assert path is not None
    plan = load_plan(path)
    assert plan.recipe.baseline == plan.steps[0].name == "tuned"
    assert plan.step("small").settings.references() == {"teacher": "tuned"}


def test_what_was_seen_is_right(models, tmp_path):
    from transformers import AutoModelForSeq2SeqLM

    seen = look(str(models["marian"]))
    model = AutoModelForSeq2SeqLM.from_pretrained(models["marian"], local_files_only=True)
    fixed = {id(p) for n, p in model.named_parameters() if "embed_positions" in n}
    stored = sum(p.numel() for p in model.parameters() if id(p) not in fixed)
    stored += model.final_logits_bias.numel()  # a buffer that the file holds
    assert (seen.family, seen.task, seen.dtype, seen.parameters) == (
        "marian",
        "translation",
        "float32",
        stored,
    )
    assert seen.limit == 40
    assert look(str(models["roberta"])).limit == 512 - 2
    half = tmp_path / "half"
    model.half().save_pretrained(half)
    for name in ("source.spm", "target.spm", "vocab.json", "tokenizer_config.json"):
        (half / name).write_bytes((models["marian"] / name).read_bytes())
    assert look(str(half)).dtype == "float16"
    config = models["bart"] / "config.json"
    values = json.loads(config.read_text())
    assert look(str(models["bart"])).task == "summarization"
    config.write_text(json.dumps(values | {"task_specific_params": {"translation_en_to_de": {}}}))
    assert look(str(models["bart"])).task == "translation"
    config.write_text(json.dumps(values))


def test_columns_with_other_names_are_found(tmp_path):
    rows = {
        "summarization": (
            {"id": "1", "dialogue": "a b", "summary": "a"},
            {"source": "dialogue", "target": "summary"},
        ),
        "text-classification": (
            {"sentence1": "a", "sentence2": "b", "label": 1},
            {"text": "sentence1", "text_pair": "sentence2"},
        ),
        "translation": ({"source": "a", "targets": ["b"]}, {}),
        "language-modeling": ({"content": "a"}, {"text": "content"}),
    }
    for task, (row, columns) in rows.items():
        (tmp_path / "test.jsonl").write_text(json.dumps(row) + "\n")
        assert look_at_data([tmp_path / "test.jsonl"], task).columns == columns
    (tmp_path / "valid.csv").write_text("review,stars\ngood,5\n")
    found = look_at_data([tmp_path / "valid.csv"], "text-classification")
    assert found.columns == {"text": "review", "label": "stars"}
    assert set(found.splits) == {"validation", "test"}
    assert "validation is scored" in found.notes[0]


def test_the_command_writes_prints_and_never_overwrites(tmp_path, models, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def smelt(*arguments):
        result = CliRunner().invoke(main, ["init", str(models["bert"]), *map(str, arguments)])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    done = smelt()
    assert done.exit_code == 0
    assert "Wrote m.yaml" in done.output
    text = (tmp_path / "m.yaml").read_text()
    assert "data/train.jsonl" in text
    (tmp_path / "m.yaml").write_text("mine")
    refused = smelt()
    assert refused.exit_code == 2
    assert "--force" in refused.output
    assert (tmp_path / "m.yaml").read_text() == "mine"
    assert smelt("--force").exit_code == 0
    assert (tmp_path / "m.yaml").read_text() == text
    assert smelt("--out", "-").output == text.replace("m.yaml", "RECIPE.yaml")
    with pytest.raises(InputError, match=r"train.jsonl: no such file"):  # the only thing that is missing
        load_plan(tmp_path / "m.yaml")


def test_an_artifact_of_a_run_is_called_by_its_step(tmp_path, models, monkeypatch):
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts" / "small").symlink_to(models["bert"])
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["init", "artifacts/small"])
    assert "Wrote small.yaml" in result.output
    assert "\nmodel: artifacts/small\n" in (tmp_path / "small.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/m"], "no such folder"),
        (["{bert}", "--task", "translation"], "a bert model is for text-classification"),
        (["{bert}", "--task", "translate"], "Did you mean 'translation'?"),
        (["{bert}", "--data", "nowhere"], "no such file or folder"),
        (["{bert}", "--data", "{bert}"], "no file in this folder is called train, validation or test"),
        (["{mbart}", "--task", "language-modeling"], "is for translation or summarization"),
    ],
)
def test_what_cannot_be_is_explained(tmp_path, models, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nowhere").mkdir() if arguments == ["nowhere/m"] else None
    places = {"{bert}": models["bert"], "{mbart}": models["bert"]}
    if "{mbart}" in arguments:
        places["{mbart}"] = families.bart(tmp_path / "mbart", kind="mbart")
    result = CliRunner().invoke(main, ["init", *(str(places.get(a, a)) for a in arguments)])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize(
    "text", ["data/a b.jsonl", "1", "yes: no", "true", "a#b", "[x]", "ü.csv", "null", "-"]
)
def test_any_name_is_written_so_that_it_reads_as_itself(text):
    assert parse_yaml(f"x: {_scalar(text)}", "").value == {"x": text}
    assert parse_yaml(f"x: {{y: {_scalar(text)}}}", "").value == {"x": {"y": text}}


def test_machine_is_looked_at_without_torch(monkeypatch):
    from smelt.init_recipe import look_at_machine

    monkeypatch.setattr(machine, "has_cuda", lambda: True)
    assert look_at_machine().gpu
    assert look_at_machine().cores >= 1


def test_the_recipe_runs_as_it_is_written(tmp_path, models, monkeypatch):
    import smelt

    monkeypatch.chdir(tmp_path)
    init_recipe(str(models["bert"]), [_data(tmp_path / "rows", "text-classification")], "r.yaml")
    changes = {"score.latency": False, "small.max_steps": 1, "threads": 1}  # only to be quick
    result = smelt.run("r.yaml", set=changes, until="onnx-int8", out="run", quiet=True)
    steps = {step["name"]: step for step in result.report["steps"]}
    assert result.exit_code == 0, result.report
    assert {step["status"] for step in steps.values()} == {"done"}
    assert steps["onnx-int8"]["size_bytes"] < steps["small"]["size_bytes"]


@pytest.mark.parametrize("kind", ["modernbert", "qwen3", "mt5", "llava"])
def test_unknown_family_is_said_without_proposing_another_one(tmp_path, models, kind):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(InputError) as raised:
        look(str(folder))
    said = str(raised.value)
    assert f"model_type '{kind}' is no family of models that this version knows. It knows" in said
    assert "for text-classification bert, distilbert, roberta" in said
    assert "Did you mean" not in said
