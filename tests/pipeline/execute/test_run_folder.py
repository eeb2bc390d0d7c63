"""A part of a recipe, run into the folder of the whole, leaves the other branches alone."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from smelt.cli.store import find_unused, remove_unused
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.store import Store
from smelt.data.splits import Example, Split
from smelt.evaluate.report.render import render_html
from smelt.evaluate.report.schema import validate_report
from smelt.pipeline.execute.run_folder import RunFolder, default_store, open_store, require_run_folder
from smelt.pipeline.plan.load_plan import load_plan
from smelt.stage import no_progress
from tests.support import harness
from tests.support.expected_errors import command_error, raises_code
from tests.support.models import tiny
from tests.support.parsed_recipes import parse_recipe

RECIPE = """
model: m
task: text-classification
data: {train: data.jsonl, test: data.jsonl}
stages:
  - prune: {targets: [ffn], keep_ratio: 0.5, importance: magnitude}
  - factorize: {energy: 0.5, optimize_for: size}
    name: left
  - quantize: {}
    name: left-int8
  - factorize: {energy: 0.9, optimize_for: size}
    from: prune
    name: right
score: {latency: false}
"""


def _run(home, *arguments, code=0, bug=False):
    command = ["run", home / "recipe.yaml", "--out", home / "runs" / "r", "--quiet", *arguments]
    result = harness.smelt(*command, code=code, expect_bug=bug)
    report = json.loads((home / "runs" / "r" / "report.json").read_text())
    validate_report(report)
    return result.output, {step["name"]: step for step in report["steps"]}, report


def _links(home):
    return sorted(path.name for path in (home / "runs" / "r" / "artifacts").iterdir())


@pytest.fixture
def home(tmp_path):
    tiny.write_bert(tmp_path / "m")
    tiny.write_labeled(tmp_path / "data.jsonl", 8)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run, and the steps of its report."""
    home = tmp_path_factory.mktemp("finished")
    tiny.write_bert(home / "m")
    tiny.write_labeled(home / "data.jsonl", 8)
    (home / "recipe.yaml").write_text(RECIPE)
    return home, _run(home)[1]


@pytest.fixture
def finished_run(finished, tmp_path):
    """A copy of the whole run, to be worked on."""
    shutil.copytree(finished[0], tmp_path / "home", symlinks=True)
    shutil.rmtree(tmp_path / "home" / "runs" / ".store" / "runs")  # its notes name the folder that was copied
    return tmp_path / "home", finished[1]


def test_partial_run_keeps_report_and_links_of_other_branches(finished_run):
    home, before = finished_run
    output, after, report = _run(home, "--until", "right")
    assert list(after) == ["model", "prune", "left", "left-int8", "right"]  # the recipe's order
    assert _links(home) == ["left", "left-int8", "model", "prune", "right"]
    assert {name: step["from_previous_run"] for name, step in after.items()} == {
        "model": False, "prune": False, "left": True, "left-int8": True, "right": False,
    }  # fmt: skip
    for name in ("left", "left-int8"):
        for key in ("key", "quality", "against_baseline", "latency", "size_bytes"):
            assert after[name][key] == before[name][key], key
        assert after[name]["status"] == "cached"
    assert ": left, left-int8" in output
    assert render_html(report).count(">kept<") == 2
    store = home / "runs" / ".store"
    assert find_unused(store).artifacts == ()
    assert remove_unused(store).artifacts == ()
    assert [step["status"] for step in _run(home)[1].values()] == ["cached"] * 5


def test_branch_with_changed_settings_is_removed(finished_run):
    home, before = finished_run
    _, after, _ = _run(home, "--until", "right", "--set", "left.energy=0.4")
    assert list(after) == ["model", "prune", "right"]
    assert _links(home) == ["model", "prune", "right"]  # left-int8 stood on what went
    unused_keys = {artifact.key for artifact in find_unused(home / "runs" / ".store").artifacts}
    assert unused_keys == {before["left"]["key"], before["left-int8"]["key"]}


def test_steps_after_changed_step_are_removed(finished_run):
    home, _ = finished_run
    _, after, _ = _run(home, "--until", "prune", "--set", "prune.keep_ratio=0.25")
    assert list(after) == ["model", "prune"]
    assert _links(home) == ["model", "prune"]


def test_full_run_and_first_run_keep_no_old_links(home):
    _, steps, _ = _run(home, "--until", "right")
    assert list(steps) == ["model", "prune", "right"]
    link = home / "runs" / "r" / "artifacts" / "of-another-recipe"
    link.symlink_to((home / "runs" / "r" / "artifacts" / "prune").resolve())
    _run(home, "--until", "model")
    assert _links(home) == ["model", "prune", "right"]  # the first of which this recipe knows
    _run(home)
    assert _links(home) == ["left", "left-int8", "model", "prune", "right"]


def test_missing_or_damaged_artifact_is_not_kept(finished_run):
    home, before = finished_run
    weights = home / "runs" / ".store" / "artifacts" / before["left"]["key"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    _, after, _ = _run(home, "--until", "right")
    assert list(after) == ["model", "prune", "right"]


def test_links_are_kept_if_parent_step_fails(finished_run, monkeypatch):
    home, _ = finished_run
    from smelt.compress.prune.stage import Prune

    def fail(self, src, settings, ctx):
        raise RuntimeError("no")

    monkeypatch.setattr(Prune, "__call__", fail)
    _run(home, "--until", "right", "--rebuild", "prune", code=1, bug=True)
    assert {"left", "left-int8"} <= set(_links(home))  # what they are nobody can tell now
    assert find_unused(home / "runs" / ".store").artifacts == () or "left" in _links(home)


def test_kept_step_is_not_scored_or_timed_again(finished_run):
    home, before = finished_run
    _, after, report = _run(home, "--until", "right", "--set", "score.quality=[accuracy]")
    left_step = after["left"]
    assert (left_step["quality"], left_step["cause"]) == ({}, "not-scored-before")
    assert "accuracy" in after["right"]["quality"]
    assert left_step["key"] == before["left"]["key"]
    assert report["status"] == "passed"


def test_latency_of_kept_step_is_only_read_from_store(tmp_path, monkeypatch):
    """`measure` is stood in for: what is asked of it is what matters here."""
    from smelt.core.store import Store
    from smelt.pipeline.execute.latency_scores import LatencyScores

    measured_folders = []

    def measure(folders, baseline, *rest, **more):
        measured_folders.append(set(folders))
        rows = {
            name: [{"batch_size": 1, "texts": 1, "stable": True, "rounds": [{"counted": True}] * 5}]
            for name in folders
        }
        return SimpleNamespace(rows=rows, peak_memory_bytes={}, gpu_memory_bytes={}, errors={}, reduced=False)

    monkeypatch.setattr("smelt.evaluate.latency.measure_latency", measure)
    recipe = parse_recipe(
        "model: m\ntask: text-classification\ndata: {test: t}\nstages: []\n", tmp_path / "r"
    )
    scores = LatencyScores(Store(tmp_path / "s"), recipe, Split("t", (Example("a", label=0),)))
    artifacts = {name: tiny.as_artifact(tmp_path) for name in ("model", "new", "old")}
    for number, (name, artifact) in enumerate(artifacts.items()):
        manifest = artifact.manifest.model_copy(update={"key": f"{number:064x}"})
        artifacts[name] = Artifact(tmp_path, manifest)
    rows_by_step = scores.measure(artifacts, "model", no_progress, known_alone=frozenset({"old"}))
    assert measured_folders == [{"model", "new"}]
    assert set(rows_by_step) == {"model", "new"}
    scores.measure(artifacts, "model", no_progress)
    assert measured_folders[1:] == [{"model", "old"}]
    rows_by_step = scores.measure(artifacts, "model", no_progress, fresh=True, known_alone=frozenset({"old"}))
    assert measured_folders[2:] == [{"model", "new"}]
    assert set(rows_by_step) == {"model", "new", "old"}


def test_folder_without_run_is_rejected(tmp_path):
    for filenames, allowed in (
        ([], True),
        ([".lock", "log.txt"], True),  # a run that was killed before it wrote anything
        (["log.txt", "recipe.yaml", "artifacts", "report.json"], True),
        (["recipe.yaml", "rows.jsonl"], False),  # where somebody keeps his recipe
        (["thesis.tex"], False),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name in filenames:
            (folder / name).touch()
        if allowed:
            require_run_folder(folder)
            continue
        with raises_code("not-a-run", InputError):
            require_run_folder(folder)
    require_run_folder(tmp_path / "new")


def test_parent_store_is_used_and_new_store_is_noted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert default_store(tmp_path / "runs" / "r") == (tmp_path / "runs" / ".store", "")
    assert default_store(tmp_path / "other" / "r") == (tmp_path / "other" / ".store", "")  # the first of all
    Store(tmp_path / "runs" / ".store")
    assert default_store(tmp_path / "runs" / "sweep" / "a" / "r") == (tmp_path / "runs" / ".store", "")
    store_path, note = default_store(tmp_path / "other" / "r")
    assert store_path == tmp_path / "other" / ".store"
    assert str(tmp_path / "runs") in note
    (tmp_path / "other" / ".store").mkdir(parents=True)  # somebody else's folder of that name
    Store(tmp_path / ".store")
    assert default_store(tmp_path / "other" / "r") == (tmp_path / ".store", "")


def test_run_in_subfolder_uses_parent_store(home):
    harness.smelt("run", home / "recipe.yaml", "--out", home / "runs" / "r", "--quiet")
    harness.smelt("run", home / "recipe.yaml", "--out", home / "runs" / "deep" / "er" / "r", "--quiet")
    assert [path.relative_to(home) for path in home.rglob(".store")] == [Path("runs", ".store")]
    report = json.loads((home / "runs" / "deep" / "er" / "r" / "report.json").read_text())
    assert {step["status"] for step in report["steps"]} == {"cached"}
    assert find_unused(home / "runs" / ".store").artifacts == ()


def test_replacing_report_of_other_recipe_is_noted(home):
    harness.smelt("run", home / "recipe.yaml", "--out", home / "runs" / "r", "--until", "prune")
    second_result = harness.smelt(
        "run", home / "recipe.yaml", "--out", home / "runs" / "r", "--until", "prune"
    )
    (home / "other.yaml").write_text(RECIPE)
    other = harness.smelt("run", home / "other.yaml", "--out", home / "runs" / "r", "--until", "prune")
    assert ["'recipe'" in result.output for result in (second_result, other)] == [False, True]


PORTABLE = """
model: m
task: text-classification
data: {train: data.jsonl, test: data.jsonl}
launch: {config_file: accelerate.yaml}
stages:
  - distill: {teacher: {model: m}, student: m, max_steps: 1}
  - onnx
  - distill: {teacher: model, student: {layers: 1}, max_steps: 1}
    from: model
"""


def test_saved_recipe_plans_same_steps_from_other_folder(home, tmp_path_factory, monkeypatch):
    (home / "m").rename(home / "n")
    (home / "m").symlink_to("n")
    (home / "accelerate.yaml").write_text("distributed_type: 'NO'\nnum_processes: 1\n")
    (home / "recipe.yaml").write_text(PORTABLE)
    plan = load_plan(home / "recipe.yaml", ["seed=3"], until="onnx")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    RunFolder(elsewhere).prepare(plan, elsewhere / ".store")
    second_plan = load_plan(elsewhere / "recipe.yaml", until="onnx")
    assert [(step.name, step.settings) for step in second_plan.steps] == [
        (step.name, step.settings) for step in plan.steps
    ]
    assert (second_plan.recipe.seed, second_plan.model_folder) == (3, home / "m")  # a link keeps its name
    assert second_plan.recipe.launch.num_processes == plan.recipe.launch.num_processes


def _move(home, target):
    (home / target).parent.mkdir()
    shutil.move(home / "runs" / "r", home / target)
    return home / target


def test_moved_run_is_explained_and_works_with_moved_store(finished_run):
    home, _ = finished_run
    moved = _move(home, "far/away")
    artifact = moved / "artifacts" / "right"
    error = command_error(harness.smelt("predict", artifact, "a text", code=2))
    assert (error.code, str(home / "far" / ".store") in str(error)) == ("moved-run", True)
    table = harness.smelt("report", moved, code=0).output
    assert "--store" in table
    assert "smelt predict" not in table
    plan = ["plan", home / "recipe.yaml", "--out", moved, "--json"]
    codes = [message["code"] for message in json.loads(harness.smelt(*plan, code=0).output)["warnings"]]
    assert "moved-run" in codes
    store = home / "runs" / ".store"
    costs = json.loads(harness.smelt(*plan, "--store", store, code=0).output)
    assert "moved-run" not in [message["code"] for message in costs["warnings"]]
    run = harness.smelt("run", home / "recipe.yaml", "--out", moved, "--store", store, code=0)
    assert "note" not in run.output
    assert artifact.resolve().parent == store / "artifacts"
    shutil.rmtree(artifact.resolve())
    removed = command_error(harness.smelt("predict", artifact, "a text", code=2))
    assert removed.code == "removed-artifact"


def test_links_of_earlier_run_are_kept_until_next_run_ends(finished_run, monkeypatch):
    home, before = finished_run
    from smelt.compress.prune.stage import Prune

    links_during_run = []

    def interrupt(self, src, settings, ctx):
        links_during_run.extend(_links(home))
        raise KeyboardInterrupt

    monkeypatch.setattr(Prune, "__call__", interrupt)
    changed = ("--set", "prune.keep_ratio=0.25")
    _run(home, *changed, code=130)
    assert links_during_run == _links(home) == ["left", "left-int8", "model", "prune", "right"]
    right = home / "runs" / "r" / "artifacts" / "right"
    assert right.resolve().name == before["right"]["key"]

    def fail(self, src, settings, ctx):
        raise InputError("no")

    monkeypatch.setattr(Prune, "__call__", fail)
    _run(home, *changed, code=1)
    assert _links(home) == ["model"]  # what the report does not describe


def test_removed_store_during_run_is_reported(home, monkeypatch):
    from smelt.compress.prune.stage import Prune

    def remove_store(self, src, settings, ctx):
        shutil.rmtree(home / "runs" / ".store")
        (ctx.out / "x").write_text("half")

    monkeypatch.setattr(Prune, "__call__", remove_store)
    _, steps, _ = _run(home, code=1)
    assert steps["prune"]["error"]["code"] == "store-removed"
    assert not (home / "runs" / ".store").exists()


def test_unusable_run_folder_is_not_reported_as_store(tmp_path):
    (tmp_path / "file").touch()
    with raises_code("unusable-folder", InputError) as excinfo:
        open_store(None, tmp_path / "file" / "run")
    assert "--out" in str(excinfo.value)
    assert "--store" not in str(excinfo.value)
    with raises_code("unusable-store", InputError):
        open_store(tmp_path / "file" / "store", tmp_path / "run")
