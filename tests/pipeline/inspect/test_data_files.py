"""What `smelt init` sees of data, and which data cannot be planned with."""

import gzip
import json
import shutil

import pytest

from smelt.core.errors import InputError
from smelt.pipeline.inspect.data_files import inspect_data
from smelt.pipeline.inspect.init_recipe import init_recipe
from smelt.pipeline.inspect.model_info import inspect_model
from tests.support.expected_errors import raises_code
from tests.support.models import embedders, init_models, masked, questions, taggers, tiny
from tests.support.pairs import matrix


@pytest.fixture(scope="module")
def models():
    return init_models.make_models()


# Files, by the names that people give them; the last is called after no split.
LAYOUTS = [
    ("train", "dev", "test"), ("train", "test"), ("train", "dev"), ("train",), ("dev",), ("test",),
    ("dev", "test"), ("train", "calib"), ("reviews",),
]  # fmt: skip


KINDS = [".jsonl", ".json", ".csv", ";.csv", ".tsv", ".parquet", ".jsonl.gz"]


def _row(task, index, label):
    sentence = f"{tiny.SENTENCES[index % 10]} {tiny.SENTENCES[index // 10 % 10]}"
    if task == "text-classification":
        return {"text": sentence, "label": label(index)}
    if task == embedders.TASK:
        return {"sentence1": sentence, "sentence2": sentence[::-1], "score": index / 7}
    if task == taggers.TASK:
        words = sentence.split()
        return {"tokens": words, "tags": ["O", "B-NAME", *["O"] * (len(words) - 2)]}
    if task == questions.TASK:
        return {"question": f"{sentence} ?", "context": sentence, "answer": sentence}
    if task == "text-generation":
        return {"question": sentence, "answer": sentence[::-1]}
    if task in ("language-modeling", masked.TASK):
        return {"text": sentence}
    return {"source": sentence, "target": sentence[::-1]}


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


# tables hold no lists of words
FAMILY_TASKS = [(f, task) for f, task in init_models.FAMILY_TASKS if task != "token-classification"]
MODELS = [*FAMILY_TASKS, ("mbart", "translation"), ("bare", "text-classification")]
# what is made of a layout depends on the task, and on whether there is a head already
WITH_ALL = {"marian", "bare"}


@pytest.mark.parametrize(
    ("model", "layout"),
    matrix.matrix_cells(MODELS, LAYOUTS, full=lambda model: model[0] in WITH_ALL),
    ids="-".join,
)
def test_init_recipe_plans_for_every_family_and_data_layout(tmp_path, models, model, layout):
    family, task = model
    folder = tmp_path / "rows"
    folder.mkdir()
    # every kind of file comes with every layout, not with every family
    kind = KINDS[(LAYOUTS.index(layout) + len(family)) % len(KINDS)]
    if task == taggers.TASK and kind.endswith((".csv", ".tsv")):
        kind = ".jsonl"  # tables cannot hold lists
    rows = [_row(task, row_number, lambda index: index % 2) for row_number in range(30)]
    files = [_write(folder / name, kind, rows) for name in layout]
    untrained = family == "bare" and "train" not in layout and layout != ("reviews",)
    # so does a folder, and files one by one
    data = ([folder], files)[(LAYOUTS.index(layout) + MODELS.index(model)) % 2]
    if untrained:
        with raises_code("missing-data", InputError):
            init_recipe(str(models[family]), data, str(tmp_path / "r.yaml"), task)
        return
    plan = init_models.plan_recipe(
        init_models.model_for(models, family, task), data, tmp_path / "r.yaml", task
    )
    assert "test" in plan.splits
    trains = [step.stage for step in plan.steps if step.trains]
    if "calibration" in plan.splits and task in ("text-classification", taggers.TASK, questions.TASK):
        assert not trains or family == "bare"  # few rows are not worth a distillation
    else:
        assert bool(trains) == ("train" in plan.splits)
    texts = {name: {e.text for e in split.examples} for name, split in plan.splits.items()}
    if "train" in texts and "test" not in layout:
        assert not texts["test"] & texts["train"]  # drawn out of it


LABELS = [
    (lambda index: index % 2, {}, "accuracy"), (lambda index: float(index % 2), {}, "accuracy"),
    (lambda index: f"class {index % 3}", None, "accuracy"), (lambda index: index % 3 + 1, None, "accuracy"),
    (lambda index: index / 7, None, "pearson"), (lambda index: "a|b" if index % 2 else "b", None, "f1_micro"),
    (lambda index: index / 7, {"problem_type": "regression", "id2label": {0: "amount"}}, "pearson"),
]  # fmt: skip


# a label has a type in one of the two and is text in the other; otherwise files are compressed or divided
@pytest.mark.parametrize(
    ("kind", "labels"), matrix.matrix_cells(KINDS, LABELS, full=lambda kind: kind in (".jsonl", ".csv"))
)
def test_init_recipe_plans_for_every_label_kind(tmp_path, models, kind, labels):
    label, config, metric = labels
    model = models["bare"]
    if config is not None:
        model = shutil.copytree(models["bert"], tmp_path / "m")
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    file = _write(
        tmp_path / "reviews", kind, [_row("text-classification", number, label) for number in range(60)]
    )
    plan = init_models.plan_recipe(model, [file], tmp_path / "r.yaml")
    assert f"gates: {{{metric}: " in (tmp_path / "r.yaml").read_text()
    assert {name: len(split) for name, split in plan.splits.items()} == {
        "train": 48,
        "validation": 6,
        "test": 6,
    }


def test_single_text_file_is_split(tmp_path, models):
    (tmp_path / "corpus.txt").write_text("\n".join(f"{s} {i}" for i in range(30) for s in tiny.SENTENCES))
    plan = init_models.plan_recipe(models["gpt2"], [tmp_path / "corpus.txt"], tmp_path / "r.yaml")
    assert {name: len(split) for name, split in plan.splits.items()} == {
        "train": 240,
        "validation": 30,
        "test": 30,
    }


def test_unplannable_data_are_rejected_before_writing(tmp_path, models):
    rows = [{"text": f"a {number}", "label": "x" if number == 2 else number % 2} for number in range(9)]
    _write(tmp_path / "train", ".jsonl", rows)
    with raises_code("unknown-label", InputError) as excinfo:
        init_recipe(str(models["bert"]), [tmp_path / "train.jsonl"], str(tmp_path / "r.yaml"))
    [error] = excinfo.value.messages
    assert error.setting == "data.train"
    assert all(value in error.message for value in ("train.jsonl:3: ", "'x'"))
    _write(tmp_path / "train", ".jsonl", rows[:2])
    with raises_code("too-few-texts", InputError):
        init_recipe(str(models["bert"]), [tmp_path / "train.jsonl"], str(tmp_path / "r.yaml"))
    assert not (tmp_path / "r.yaml").exists()


def test_embedder_max_tokens_is_its_truncation_length(tmp_path):
    assert inspect_model(str(embedders.write_embedder(tmp_path / "short", max_length=17))).max_tokens == 17
    assert inspect_model(str(embedders.write_embedder(tmp_path / "long"))).max_tokens == 32
    assert inspect_model(str(tmp_path / "short"), "text-classification").max_tokens == 17


def test_inspected_model_facts_are_correct(models, tmp_path):
    from transformers import AutoModelForSeq2SeqLM

    info = inspect_model(str(models["marian"]))
    model = AutoModelForSeq2SeqLM.from_pretrained(models["marian"], local_files_only=True)
    fixed = {id(p) for n, p in model.named_parameters() if "embed_positions" in n}
    stored = sum(p.numel() for p in model.parameters() if id(p) not in fixed)
    stored += model.final_logits_bias.numel()  # a buffer that the file holds
    assert (info.family, info.task, info.dtype, info.parameters) == (
        "marian",
        "translation",
        "float32",
        stored,
    )
    assert info.max_tokens == 40
    assert inspect_model(str(models["roberta"])).max_tokens == 40  # the tokenizer's limit
    short = tmp_path / "short"
    shutil.copytree(models["roberta"], short)
    settings = json.loads((short / "tokenizer_config.json").read_text())
    for length, expected in ((60, 60), (1e30, 512 - 2), (None, 512 - 2)):
        (short / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": length}))
        assert inspect_model(str(short)).max_tokens == expected
    half = tmp_path / "half"
    model.half().save_pretrained(half)
    for name in ("source.spm", "target.spm", "vocab.json", "tokenizer_config.json"):
        (half / name).write_bytes((models["marian"] / name).read_bytes())
    assert inspect_model(str(half)).dtype == "float16"
    config = models["bart"] / "config.json"
    values = json.loads(config.read_text())
    assert inspect_model(str(models["bart"])).task == "summarization"
    config.write_text(json.dumps(values | {"task_specific_params": {"translation_en_to_de": {}}}))
    assert inspect_model(str(models["bart"])).task == "translation"
    config.write_text(json.dumps(values))


def test_columns_with_other_names_are_recognized(tmp_path):
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
        "text-generation": (
            {"question": "a", "completion": "b"},
            {"prompt": "question", "response": "completion"},
        ),
    }
    for task, (row, columns) in rows.items():
        (tmp_path / "test.jsonl").write_text(json.dumps(row) + "\n")
        assert inspect_data([tmp_path / "test.jsonl"], task).columns == columns
    (tmp_path / "valid.csv").write_text("review,stars\ngood,5\n")
    data = inspect_data([tmp_path / "valid.csv"], "text-classification")
    assert data.columns == {"text": "review", "label": "stars"}
    assert set(data.splits) == {"validation", "test"}
    assert "validation is scored" in data.notes[0]


def test_folder_next_to_a_file_of_rows_is_no_split(tmp_path):
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        row = {"image": f"{name}/1.png", "caption": "a cat"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    data = inspect_data([tmp_path], "image-text")
    assert data.splits == {name: tmp_path / f"{name}.jsonl" for name in ("train", "test")}
    assert data.columns == {"text": "caption"}


def test_columns_of_metadata_in_image_folders_are_recognized(tmp_path):
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata.csv").write_text("file_name,caption\n1.png,a cat\n")
    data = inspect_data([tmp_path], "image-text")
    assert data.splits == {name: tmp_path / name for name in ("train", "test")}
    assert data.columns == {"text": "caption"}


def test_metadata_of_audio_folders_are_files_of_rows(tmp_path):
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata.csv").write_text("file_name,transcription\n1.wav,hello\n")
    data = inspect_data([tmp_path], "speech-recognition")
    assert data.splits == {name: tmp_path / name / "metadata.csv" for name in ("train", "test")}
    assert data.columns == {"audio": "file_name", "transcript": "transcription"}
