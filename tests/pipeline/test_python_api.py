"""In Python: recipes that are built, one stage on one model, and the report as an object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pandas
import pytest
from ruamel.yaml import YAML

import smelt
from smelt.core.messages import message_codes
from tests.support.expected_errors import message_locations, raises_code
from tests.support.models import embedders, family_models, tiny


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    tiny.write_bert(folder / "m")
    tiny.write_labeled(folder / "data.jsonl", 8)
    return folder


def recipe(home: Path, **changes: Any) -> smelt.Recipe:
    values: dict[str, Any] = {
        "model": Path("m"),
        "task": "text-classification",
        "data": {"test": "data.jsonl"},
        "stages": [{"quantize": {"scheme": "int8-dynamic"}}, {"onnx": {}, "name": "graph"}],
        "score": {"latency": False},
    }
    return smelt.Recipe(**(values | changes), name="api", base=home)


@pytest.fixture(scope="module")
def result(home: Path) -> Any:
    return smelt.run(recipe(home), out=home / "run", quiet=True)


def test_python_recipe_runs_and_is_saved_as_file(result: Any, home: Path) -> None:
    assert result.exit_code == 0
    assert [step["name"] for step in result.report["steps"]] == ["model", "quantize", "graph"]
    assert YAML(typ="safe").load((home / "run" / "recipe.yaml").read_text())["stages"][1]["name"] == "graph"


def test_recipe_round_trips_through_yaml(home: Path, tmp_path: Path) -> None:
    api_recipe = recipe(home, seed=3)
    api_recipe.to_yaml(tmp_path / "r.yaml")
    reloaded = smelt.Recipe.from_yaml(tmp_path / "r.yaml")
    assert reloaded.text == api_recipe.text
    assert reloaded.path == tmp_path / "r.yaml"
    assert smelt.Recipe.from_yaml(api_recipe.text).text == api_recipe.text
    assert YAML(typ="safe").load(api_recipe.text)["seed"] == 3


def test_list_used_twice_is_written_without_anchor(home: Path) -> None:
    stages = [
        {"quantize": {"exclude": (names := ["*.classifier"])}},
        {"quantize": {"exclude": names}, "name": "b"},
    ]
    assert "&" not in recipe(home, stages=stages).text


def test_recipe_errors_are_reported_together(home: Path) -> None:
    with raises_code("several-errors", smelt.InputError) as excinfo:
        recipe(home, task="sentiment", stages=[{"quantze": {}}])
    assert [error.setting for error in excinfo.value.messages] == ["task", "stages[0].quantze"]


def test_single_error_has_setting_file_and_line(home: Path) -> None:
    with raises_code("unknown-task", smelt.InputError) as excinfo:
        recipe(home, task="sentiment")
    assert (excinfo.value.setting, excinfo.value.file, excinfo.value.line) == ("task", "api.yaml", 2)


def test_stage_settings_are_checked_on_construction(home: Path) -> None:
    with raises_code("unknown-setting", smelt.InputError) as excinfo:
        recipe(home, stages=[{"quantize": {"schema": "int4"}}])
    assert excinfo.value.setting == "stages[0].quantize.schema"


def test_unserializable_values_are_rejected(home: Path) -> None:
    with raises_code("wrong-value", smelt.InputError) as excinfo:
        recipe(home, stages=[{"prune": {"keep_ratio": object()}}])
    assert excinfo.value.setting == "stages[0].prune.keep_ratio"


@pytest.mark.parametrize("stages", ["quantize", {"quantize": {"scheme": "int4"}}])
def test_stages_must_be_list(home: Path, stages: Any) -> None:
    with raises_code("wrong-value", smelt.InputError) as excinfo:
        recipe(home, stages=stages)
    assert excinfo.value.setting == "stages"


@pytest.mark.parametrize("name", ["", "a/b", "..", None])
def test_recipe_name_must_be_valid_folder_name(home: Path, name: Any) -> None:
    with raises_code("wrong-value", smelt.InputError) as excinfo:
        smelt.Recipe("m", "text-classification", {"test": "data.jsonl"}, name=name, base=home)
    assert excinfo.value.setting == "name"


def test_numpy_numbers_are_accepted(home: Path) -> None:
    data = {"train": Path("data.jsonl"), "test": "data.jsonl"}
    stages = [{"factorize": {"keep_ratio": numpy.float64(0.5), "calibration_samples": numpy.int64(8)}}]
    api_recipe = recipe(home, seed=numpy.int64(3), data=data, stages=stages)
    assert YAML(typ="safe").load(api_recipe.text)["stages"] == [
        {"factorize": {"keep_ratio": 0.5, "calibration_samples": 8}}
    ]
    plan = smelt.plan(api_recipe, overrides={"seed": numpy.int64(4), "data.test": Path("data.jsonl")})
    assert plan.recipe.seed == 4


def test_unwritable_yaml_file_is_input_error(home: Path) -> None:
    with raises_code("unwritable-file", smelt.InputError):
        recipe(home).to_yaml(home)


def test_overrides_accept_any_character(home: Path) -> None:
    with raises_code("missing-file", smelt.InputError) as excinfo:
        smelt.plan(recipe(home), overrides={"data.test": "\N{GRINNING FACE}.jsonl"})
    assert "\N{GRINNING FACE}.jsonl" in str(excinfo.value)


def test_overrides_of_wrong_type_are_rejected(home: Path) -> None:
    assert smelt.plan(recipe(home), overrides=None).steps
    with raises_code("wrong-value", smelt.InputError):
        smelt.plan(recipe(home), overrides=[("seed", 3)])  # type: ignore[list-item]


def test_plan_equals_output_of_command(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.support import harness

    plan = smelt.plan(recipe(home), overrides={"quantize.scheme": "int4"})
    assert [(step.name, step.stage) for step in plan.steps] == [("quantize", "quantize"), ("graph", "onnx")]
    assert "few-test-rows" in message_codes(plan.warnings)
    recipe(home).to_yaml(home / "api.yaml")
    printed = harness.smelt("plan", str(home / "api.yaml"), "--set", "quantize.scheme=int4", code=0).output
    assert not str(plan).endswith("\n")
    assert printed.split(":", 1)[1].startswith(f"{str(plan).split(':', 1)[1]}\n\nstep")
    assert "int4" in str(plan)


def test_overrides_change_recipe_for_one_run(home: Path, result: Any) -> None:
    other = smelt.run(
        recipe(home), overrides={"quantize.scheme": "int4"}, out=home / "o", store=home / ".store", quiet=True
    )
    sizes = [{s["name"]: s["size_bytes"] for s in r.report["steps"]} for r in (result, other)]
    assert sizes[1]["quantize"] < sizes[0]["quantize"]


def test_steps_in_rebuild_are_executed_again(home: Path, result: Any) -> None:
    def status(**options: Any) -> dict[str, str]:
        run_result = smelt.run(recipe(home), out=home / "run", quiet=True, **options)
        return {step["name"]: step["status"] for step in run_result.report["steps"]}

    assert set(status().values()) == {"cached"}
    assert status(rebuild=["quantize"])["quantize"] == "done"


def test_report_to_frame_has_row_per_step_with_scores(result: Any) -> None:
    frame = result.report.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.index) == ["model", "quantize", "graph"]
    steps = {step["name"]: step for step in result.report["steps"]}
    assert frame.loc["graph", "accuracy"] == steps["graph"]["quality"]["accuracy"]["value"]
    test = steps["graph"]["against_baseline"]["accuracy"]
    assert frame.loc["graph", "accuracy_difference"] == test["difference"]
    assert frame.loc["graph", "size_bytes"] == steps["graph"]["size_bytes"]


def test_report_html_in_notebook_is_escaped_iframe(result: Any) -> None:
    page = result.report._repr_html_()
    assert page.startswith("<iframe srcdoc=")
    assert page.count('"') == 6  # of the three attributes: the page itself is escaped


def test_report_is_read_from_run_folder(result: Any, home: Path, tmp_path: Path) -> None:
    steps = smelt.Report.read(home / "run")["steps"]
    assert [step["key"] for step in steps] == [step["key"] for step in result.report["steps"]]
    assert smelt.Report.read(home / "run" / "report.json")["status"] == "passed"
    with raises_code("missing-file", smelt.InputError):
        smelt.Report.read(tmp_path)
    (tmp_path / "report.json").write_text("{")
    with raises_code("damaged-file", smelt.InputError):
        smelt.Report.read(tmp_path)


def test_report_of_other_schema_is_rejected_with_file_name(result: Any, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(dict(result.report) | {"schema": 1}))
    with raises_code("invalid-report", smelt.InputError) as excinfo:
        smelt.Report.read(tmp_path)
    assert excinfo.value.file == str(tmp_path / "report.json")


def test_report_repr_shows_name_and_status(result: Any) -> None:
    assert repr(result.report) == "Report('api', 'passed')"


@pytest.mark.parametrize("step", ["", "..", "quantze"])
def test_unknown_step_has_no_artifact(result: Any, step: str) -> None:
    with raises_code("no-artifact", smelt.InputError):
        result.artifact(step)


def test_apply_of_single_stages_equals_recipe_run(home: Path, result: Any, tmp_path: Path) -> None:
    quantized = smelt.apply("quantize", home / "m", out=tmp_path / "q", scheme="int8-dynamic")
    graph = smelt.apply("onnx", quantized.path, out=tmp_path / "deep" / "g", data=home / "data.jsonl")
    for artifact, step in ((quantized, "quantize"), (graph, "graph")):
        expected_files = json.loads((result.artifact(step) / "manifest.json").read_text())["files"]
        suffixes = (".safetensors", ".onnx")
        hashes = {
            name: record.sha256 for name, record in artifact.manifest.files.items() if name.endswith(suffixes)
        }
        assert hashes == {
            name: record["sha256"] for name, record in expected_files.items() if name.endswith(suffixes)
        }
    with smelt.load(graph.path) as model:
        assert 0.5 <= max(model.predict(["a text"])[0].probabilities.values()) <= 1


def test_apply_calibrates_on_given_data(home: Path, tmp_path: Path) -> None:
    artifact = smelt.apply(
        "quantize",
        home / "m",
        out=tmp_path / "q",
        scheme="int4",
        method="gptq",
        calibration_samples=4,
        data=home / "data.jsonl",
    )
    assert "few-calibration-tokens" in message_codes(artifact.manifest.warnings)


def test_rejected_apply_writes_nothing(home: Path, tmp_path: Path) -> None:
    with raises_code("unknown-setting", smelt.InputError):
        smelt.apply("quantize", home / "m", out=tmp_path / "q", schema="int4")
    with pytest.raises(smelt.InputError):
        smelt.apply("quantze", home / "m", out=tmp_path / "q")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with raises_code("out-exists", smelt.InputError):
        smelt.apply("quantize", home / "m", out=tmp_path / "full")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


def test_apply_errors_name_arguments(home: Path, tmp_path: Path) -> None:
    with raises_code("several-errors", smelt.InputError) as excinfo:
        smelt.apply("quantize", home / "m", out=tmp_path / "q", schema="int4", seed=-1)
    assert message_locations(excinfo.value.messages) == [
        ("wrong-value", "seed", None),
        ("unknown-setting", "schema", None),
    ]
    assert "yaml" not in str(excinfo.value)
    with raises_code("missing-file", smelt.InputError) as excinfo:
        smelt.apply("quantize", home / "m", out=tmp_path / "q", data=tmp_path / "none.jsonl")
    assert [error.setting for error in excinfo.value.messages] == ["data.calibration"]
    with raises_code("wrong-value", smelt.InputError) as excinfo:
        smelt.apply("quantize", home / "m", out=tmp_path / "q", data=["rows.jsonl"])  # type: ignore[arg-type]
    with raises_code("wrong-value", smelt.InputError) as excinfo:
        smelt.apply("quantize", home / "m", out=tmp_path / "q", scheme=object())
    assert excinfo.value.setting == "scheme"
    with raises_code("parent-not-a-folder", smelt.InputError):
        smelt.apply("quantize", home / "m", out=home / "data.jsonl" / "q")


def test_apply_splits_test_samples_as_data_specify(home: Path, tmp_path: Path) -> None:
    data = {"train": home / "data.jsonl", "split": {"test": 0.25}}
    smelt.apply("finetune", home / "m", out=tmp_path / "f", data=data, max_steps=1)
    assert (tmp_path / "f" / "manifest.json").is_file()


@pytest.mark.parametrize("where", ["smelt.compress.quantize.stage.Quantize.__call__", "shutil.copytree"])
def test_interrupted_apply_writes_nothing(
    home: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupt)
    with pytest.raises(KeyboardInterrupt):
        smelt.apply("quantize", home / "m", out=tmp_path / "deep" / "q")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("task", ["translation", "language-modeling", "sentence-similarity"])
def test_apply_without_data_for_stage_that_requires_none(task: str, tmp_path: Path) -> None:
    write_model = {
        "translation": tiny.write_marian,
        "language-modeling": family_models.MAKERS["gpt2"],
        "sentence-similarity": embedders.write_embedder,
    }
    write_model[task](tmp_path / "m")
    artifact = smelt.apply("quantize", tmp_path / "m", out=tmp_path / "q", task=task)
    assert artifact.manifest.task == task
