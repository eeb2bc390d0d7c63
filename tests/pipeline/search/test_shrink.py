"""`smelt shrink`: targets, the space that follows from model, task and time, and a search of it."""

import gzip
import itertools
import json

import pytest

import smelt
from smelt.pipeline.inspect.model_info import inspect_model
from smelt.pipeline.search.shrink import (
    RECIPE_FILE,
    Measured,
    ShrinkOptions,
    Target,
    _Shrink,
    _space_stages,
    parse_max_degradation,
    parse_target,
    plan_shrink,
    target_text,
)
from smelt.pipeline.search.space import read_space
from smelt.pipeline.search.study import Search, SearchOptions
from tests.support import harness
from tests.support.expected_errors import command_error, raises_code
from tests.support.models import causal, classifiers, init_models
from tests.support.models.every_family import make_model
from tests.support.search_recipes import QUICKSTART


@pytest.mark.quick
@pytest.mark.parametrize(("text", "kind", "value"), [
    ("2x faster", "speedup", 2), ("1.5 x  faster", "speedup", 1.5), ("4× smaller", "ratio", 4),
    ("at most 20 MB", "bytes", 20e6), ("under 1.5GB", "bytes", 1.5e9),
])  # fmt: skip
def test_target_is_parsed(text, kind, value):
    target = parse_target(text)
    assert (target.kind, target.value) == (kind, value)
    assert isinstance(target, Target)


@pytest.mark.quick
def test_invalid_target_or_max_degradation_is_rejected():
    for text in ("faster", "1x faster", "0.5x smaller", "at most 0 MB", "2x better", ""):
        with raises_code("wrong-value"):
            parse_target(text)
    assert parse_max_degradation("bleu 0.5") == ("bleu", 0.5)
    assert parse_max_degradation("accuracy: 1") == ("accuracy", 1.0)
    assert parse_max_degradation("text_retrieval_recall@1 2") == ("text_retrieval_recall@1", 2.0)
    for text in ("bleu", "0.5", "blue 1", "bleu -1"):
        with raises_code("wrong-value"):
            parse_max_degradation(text)


def names(stages):
    return [next(iter(stage)) for stage in stages]


@pytest.mark.parametrize(("family", "task", "expected"), [
    ("marian", "translation", ["prune", "distill", "quantize", "onnx"]),
    ("bert", "text-classification", ["prune", "distill", "quantize", "onnx"]),
    ("llama", "language-modeling", ["prune", "distill", "quantize", "onnx"]),
    ("resnet", "image-classification", ["factorize", "distill", "onnx"]),
    ("clip", "image-text", ["prune", "distill", "quantize", "onnx"]),
    ("whisper", "speech-recognition", ["prune", "distill", "quantize", "onnx"]),
])  # fmt: skip
def test_space_depends_on_task_samples_and_time(tmp_path, family, task, expected):
    make_model(tmp_path / "m", family)
    info = inspect_model(str(tmp_path / "m"), task)
    stages, notes = _space_stages(info, Measured(1000, "x", 500, 0.1), updates=300, minutes=10)
    assert names(stages) == expected
    assert all(stage.get("optional") == "search" for stage in stages[:-1])
    distill = next(stage["distill"] for stage in stages if "distill" in stage)
    assert distill["max_steps"] == 300
    assert ("logits" in distill["losses"]) == (task != "image-text")
    without, _ = _space_stages(info, Measured(1000, "x", 500, 0.1), updates=0, minutes=10)
    assert names(without) == [name for name in expected if name != "distill"]
    none, _ = _space_stages(info, Measured(1000, "x", 0, None), updates=0, minutes=10)
    assert names(none)[0] == "factorize"
    many_stages, _ = _space_stages(info, Measured(1000, "x", 10_000, 0.1), updates=300, minutes=30)
    assert ("shortlist" in names(many_stages)) == (task == "translation")
    assert ("autotune" in many_stages[-1]["onnx"]) == (family != "resnet")
    assert len(notes) >= len(stages)


def test_new_classifier_is_finetuned_first_and_is_baseline(tmp_path):
    bare_model = init_models.make_models()["bare"]
    classifiers.write_labeled_rows(tmp_path / "train.jsonl", "single_label_classification")
    lines = []
    space = plan_shrink(
        str(bare_model),
        [tmp_path / "train.jsonl"],
        ShrinkOptions(("2x faster", "3x smaller"), time_limit_minutes=5, task="text-classification"),
        lines.append,
    )
    assert space.plan.recipe.baseline == "tuned"
    assert space.plan.steps[0].name == "tuned"
    assert set(space.constraints) == {"accuracy", "speedup", "size_bytes"}
    assert space.constraints["accuracy"].max_degradation == 1.0
    assert not list(tmp_path.glob("*shrink*"))


def test_unbounded_metric_requires_max_degradation(tmp_path):
    causal.write_model(tmp_path / "m", "gpt2")
    (tmp_path / "text.txt").write_text("the man and the dog run over the green grass.\n" * 400)
    options = ShrinkOptions(("2x faster",), time_limit_minutes=1)
    with raises_code("missing-max-degradation"):
        plan_shrink(str(tmp_path / "m"), [tmp_path / "text.txt"], options, None)
    out = tmp_path / "out"
    with raises_code("does-not-fit-task"):
        smelt.shrink(tmp_path / "m", tmp_path / "text.txt", max_degradation="bleu 1", out=out, quiet=True)
    assert not out.exists()


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory):
    out, data = tmp_path_factory.mktemp("shrink") / "out", tmp_path_factory.mktemp("data")
    for path in (QUICKSTART / "data").iterdir():  # of hundreds of rows scores would take most of the time
        with gzip.open(path, "rt") as rows, gzip.open(data / path.name, "wt") as few_rows:
            few_rows.writelines(itertools.islice(rows, 40))
    arguments = [QUICKSTART / "model", "--data", data, "--time-limit", "2s", "--out", out]
    with pytest.MonkeyPatch.context() as patch:
        # half of the time, and tested elsewhere
        patch.setattr("smelt.pipeline.search.shrink._LATENCY", False)
        patch.setattr("smelt.pipeline.search.shrink._TIMED_UPDATES", (1, 2, 3))
        result = harness.smelt("shrink", *arguments, "--target", "1.1x smaller", code=0)
    return out, arguments, result


def test_winner_has_recipe_report_and_artifact(shrunk):
    out, _, result = shrunk
    report = json.loads((out / "search.json").read_text())
    [best] = report["front"]
    assert best["parameters"]["quantize"] is True
    assert best["parameters"]["prune"] is False
    assert (out / best["recipe"]).is_file()
    assert smelt.load(out / best["artifact"])
    model = sum(p.stat().st_size for p in (QUICKSTART / "model").iterdir())
    assert best["size_bytes"] < model / 1.1
    assert best["name"] in result.stdout.splitlines()[-1]
    assert best["name"] in target_text(report, ["1.1x smaller"])


def test_same_arguments_resume_search(shrunk):
    out, arguments, _ = shrunk
    options = ShrinkOptions(("1.1x smaller",), time_limit_minutes=2 / 60, out=out)
    job = _Shrink(str(arguments[0]), [arguments[2]], options)
    assert job.written_recipe() == out / RECIPE_FILE
    search = Search(read_space(str(out / RECIPE_FILE)), SearchOptions(out=out))
    search.try_first({})
    assert len(search.open_study().get_trials()) == len(search.finished_trials())


def test_different_arguments_do_not_resume_search(shrunk, monkeypatch):
    _, arguments, _ = shrunk
    monkeypatch.setattr(_Shrink, "_measure", lambda *_: Measured(1_000_000, "bleu", 300, 0.1))
    error = command_error(harness.smelt("shrink", *arguments, "--target", "9x smaller", code=2))
    assert error.code == "other-study"


@pytest.mark.quick
def test_unreachable_target_reports_nearest_trial():
    nearest = {"name": "trial-0003", "violations": {"size_bytes": 500.0, "bleu": -0.2}}
    text = target_text({"front": [], "nearest": nearest}, ["9x smaller"])
    assert [fragment in text for fragment in ("9x smaller", "trial-0003", "size_bytes", "500", "bleu")] == [
        True
    ] * 4 + [False]
    assert "9x smaller" in target_text({"front": [], "nearest": None}, ["9x smaller"])


def test_onnx_file_is_rejected(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"x")
    error = command_error(harness.smelt("shrink", tmp_path / "m.onnx", "--data", tmp_path, code=2))
    assert error.code == "does-not-fit-model"
