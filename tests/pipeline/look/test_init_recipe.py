"""`smelt init`: a recipe that plans, for every family and task, and says what was seen."""

import gzip
import json
import shutil

import every_family
import pytest
import seq2seq
import tiny
import untrained
from click.testing import CliRunner

from smelt.cli import main
from smelt.core.errors import InputError
from smelt.families.registry import BY_TASK, FAMILIES
from smelt.look import machine
from smelt.look.data import look_at_data
from smelt.look.init_recipe import Machine, _scalar, init_recipe, recipe_text
from smelt.look.model import look
from smelt.plan.load import load_plan
from smelt.recipe.yaml_file import parse_yaml

# those that have to be told their languages have a test of their own
CASES = [(f, task) for task, known in BY_TASK.items() for f in known if FAMILIES[f].languages != "codes"]
_GPU = Machine(cores=4, gpu=True, tensorrt=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny model of every family."""
    made = {}
    for family in untrained.CONFIGS:
        labels = ["0", "1"] if untrained.CONFIGS[family][0] == "text-classification" else []
        made[family] = untrained.made(tmp_path_factory.mktemp(family), family, labels=labels)[0]
    for family in every_family.CONFIGS:
        made[family] = every_family.make(tmp_path_factory.mktemp(family) / "m", family)
    made["mbart"] = seq2seq.bart(tmp_path_factory.mktemp("mbart") / "m", kind="mbart")
    made["bare"] = shutil.copytree(made["bert"], tmp_path_factory.mktemp("bare") / "m")
    path = made["bare"] / "config.json"
    config = json.loads(path.read_text()) | {"architectures": ["BertModel"]}
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in ("id2label", "problem_type")}))
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


# Files, by the names that people give them; the last is called after no split.
LAYOUTS = [
    ("train", "dev", "test"), ("train", "test"), ("train", "dev"), ("train",), ("dev",), ("test",),
    ("dev", "test"), ("train", "calib"), ("reviews",),
]  # fmt: skip
KINDS = [".jsonl", ".json", ".csv", ";.csv", ".tsv", ".parquet", ".jsonl.gz"]


def _row(task, at, label):
    word = f"{tiny.SENTENCES[at % 10]} {tiny.SENTENCES[at // 10 % 10]}"
    if task == "text-classification":
        return {"text": word, "label": label(at)}
    return {"text": word} if task == "language-modeling" else {"source": word, "target": word[::-1]}


def _write(path, kind, rows):
    import pyarrow
    import pyarrow.parquet

    path = path.with_name(path.name + kind.removeprefix(";"))
    if kind == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif "csv" in kind or "tsv" in kind:
        mark = {".csv": ",", ";.csv": ";", ".tsv": "\t"}[kind]
        fields = [list(rows[0]), *([str(v) for v in row.values()] for row in rows)]
        path.write_text("\n".join(map(mark.join, fields)))
    elif kind == ".json":
        path.write_text(json.dumps(rows))
    else:
        text = "\n".join(map(json.dumps, rows)).encode()
        path.write_bytes(gzip.compress(text) if kind.endswith("gz") else text)
    return path


def _plans(model, data, path, task=None):
    """Write a recipe, plan it as it is and with its gates, and return the plan."""
    text, _ = init_recipe(str(model), data, str(path), task, force=True)
    plan = load_plan(path)
    assert not plan.blocked
    path.write_text(text.replace("\n# gates:", "\ngates:"))
    assert load_plan(path).gates
    return plan


@pytest.mark.parametrize("layout", LAYOUTS, ids="-".join)
@pytest.mark.parametrize(
    ("family", "task"), [*CASES, ("mbart", "translation"), ("bare", "text-classification")]
)
def test_what_init_writes_plans_for_every_family_and_layout_of_data(tmp_path, models, family, task, layout):
    folder = tmp_path / "rows"
    folder.mkdir()
    # every kind of file comes with every layout, not with every family
    kind = KINDS[(LAYOUTS.index(layout) + len(family)) % len(KINDS)]
    rows = [_row(task, at, lambda at: at % 2) for at in range(30)]
    files = [_write(folder / name, kind, rows) for name in layout]
    refused = "no rows to train one on" if family == "bare" and "train" not in layout else ""
    if family == "bare" and layout == ("reviews",):
        refused = ""
    for data in ([folder], files):
        if refused:
            with pytest.raises(InputError, match=refused):
                init_recipe(str(models[family]), data, str(tmp_path / "r.yaml"), task)
            continue
        plan = _plans(models[family], data, tmp_path / "r.yaml", task)
        assert "test" in plan.splits
        trains = [step.stage for step in plan.steps if step.trains]
        assert bool(trains) == ("train" in plan.splits)
        texts = {name: {e.text for e in split.examples} for name, split in plan.splits.items()}
        if "train" in texts and "test" not in layout:
            assert not texts["test"] & texts["train"]  # drawn out of it


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("label", "config", "metric"),
    [
        (lambda at: at % 2, {}, "accuracy"),
        (lambda at: float(at % 2), {}, "accuracy"),
        (lambda at: f"class {at % 3}", None, "accuracy"),
        (lambda at: at % 3 + 1, None, "accuracy"),
        (lambda at: at / 7, None, "pearson"),
        (lambda at: "a|b" if at % 2 else "b", None, "f1_micro"),
        (lambda at: at / 7, {"problem_type": "regression", "id2label": {0: "amount"}}, "pearson"),
    ],
)
def test_what_init_writes_plans_for_every_kind_of_label(tmp_path, models, kind, label, config, metric):
    model = models["bare"]
    if config is not None:
        model = shutil.copytree(models["bert"], tmp_path / "m")
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    file = _write(tmp_path / "reviews", kind, [_row("text-classification", at, label) for at in range(60)])
    plan = _plans(model, [file], tmp_path / "r.yaml")
    assert f"gates: {{{metric}: " in (tmp_path / "r.yaml").read_text()
    assert {name: len(split) for name, split in plan.splits.items()} == {
        "train": 48,
        "validation": 6,
        "test": 6,
    }


@pytest.mark.parametrize("machine", [Machine(2, False, False), Machine(2, True, False), _GPU], ids=str)
def test_what_init_writes_plans_on_every_machine(tmp_path, models, monkeypatch, machine):
    monkeypatch.setattr("smelt.look.init_recipe.look_at_machine", lambda: machine)
    plan = _plans(models["bert"], [_data(tmp_path / "rows", "text-classification")], tmp_path / "r.yaml")
    assert ("tensorrt" in [step.stage for step in plan.steps]) == machine.gpu


def test_plain_text_in_one_file_is_divided(tmp_path, models):
    (tmp_path / "corpus.txt").write_text("\n".join(f"{s} {i}" for i in range(30) for s in tiny.SENTENCES))
    plan = _plans(models["gpt2"], [tmp_path / "corpus.txt"], tmp_path / "r.yaml")
    assert {name: len(split) for name, split in plan.splits.items()} == {
        "train": 240,
        "validation": 30,
        "test": 30,
    }


def test_data_that_cannot_be_planned_with_are_refused_and_nothing_is_written(tmp_path, models):
    rows = [{"text": f"a {at}", "label": "x" if at == 2 else at % 2} for at in range(9)]
    _write(tmp_path / "train", ".jsonl", rows)
    with pytest.raises(
        InputError, match=r"no recipe is written.*\n.*train.jsonl:3: the label 'x' is not one of"
    ):
        init_recipe(str(models["bert"]), [tmp_path / "train.jsonl"], str(tmp_path / "r.yaml"))
    _write(tmp_path / "train", ".jsonl", rows[:2])
    with pytest.raises(InputError, match=r"2 different texts cannot be divided into 3 splits"):
        init_recipe(str(models["bert"]), [tmp_path / "train.jsonl"], str(tmp_path / "r.yaml"))
    assert not (tmp_path / "r.yaml").exists()


def test_columns_and_languages_are_taken_from_the_command_line(tmp_path, models, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "all.csv").write_text("xx;yy\n" + "".join(f"a {i};{i % 2}\n" for i in range(20)))

    def smelt(*arguments):
        result = CliRunner().invoke(main, ["init", *map(str, arguments)])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    refused = smelt(models["bert"], "--data", "all.csv")
    assert refused.exit_code == 2
    assert (
        "no column looks like the text; there are: xx, yy. Name it with --column text=NAME." in refused.output
    )
    done = smelt(
        models["bert"], "--data", "all.csv", "--column", "text=xx", "--column", "label=yy", "--out", "r.yaml"
    )
    assert done.exit_code == 0, done.output
    assert load_plan(tmp_path / "r.yaml").recipe.data.columns.text == "xx"
    assert "Did you mean 'label'" in smelt(models["bert"], "--column", "lable=yy").output
    other = shutil.copytree(models["mbart"], tmp_path / "mbart")
    path = other / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "tgt_lang"}))
    tiny.pairs(tmp_path / "train.jsonl", 20)
    assert "--source-language en_XX --target-language de_DE" in smelt(other, "--data", "train.jsonl").output
    done = smelt(other, "--data", "train.jsonl", "--target-language", "de_DE", "--out", "m.yaml")
    assert done.exit_code == 0, done.output
    data = load_plan(tmp_path / "m.yaml").recipe.data
    assert (data.source_language, data.target_language) == ("en_XX", "de_DE")
    assert "a bert model takes none" in smelt(models["bert"], "--source-language", "en").output


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
        places["{mbart}"] = seq2seq.bart(tmp_path / "mbart", kind="mbart")
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
    from smelt.look.init_recipe import look_at_machine

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


@pytest.mark.parametrize("kind", ["deberta-v2", "gemma3", "mt5", "llava"])
def test_unknown_family_is_said_without_proposing_another_one(tmp_path, models, kind):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(InputError) as raised:
        look(str(folder))
    said = str(raised.value)
    assert f"model_type '{kind}' is no family of models that this version knows. It knows" in said
    assert "for text-classification bert, distilbert, roberta, mpnet, modernbert" in said
    assert "Did you mean" not in said
