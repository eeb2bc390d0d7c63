"""A custom metric, named by its import path: the value, tests, gates, and every error with its code."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.evaluate.custom_metric import copy_custom_metrics, load_custom_metric, score_custom_metric
from smelt.evaluate.significance import compare_steps
from smelt.pipeline.plan.load_plan import load_plan
from tests.support import harness
from tests.support.expected_errors import command_error, raises_code
from tests.support.expected_intervals import student_interval
from tests.support.models import causal

MODULE = """
import sys

import numpy as np

def lengths(predictions, references, sources):
    return [len(p) - len(s) for p, s in zip(predictions, sources)]

def array(predictions, references, sources):
    return np.array([float(len(r) > 1) for r in references])

def whole(predictions, references, sources):
    return np.float64(len("".join(predictions)))

def fails(predictions, references, sources):
    return [1 / len(p) for p in predictions]

def fails_together(predictions, references, sources):
    return [1 / (2 - len(predictions)) for p in predictions]

def nan(predictions, references, sources):
    return [float("nan") if p == "bb" else 1 for p in predictions]

def short(predictions, references, sources):
    return [1.0]

def huge_integer(predictions, references, sources):
    return [10 ** 400] * len(predictions)

def large(predictions, references, sources):
    return [1e308] * len(predictions)

def exits(predictions, references, sources):
    sys.exit(0)

def text(predictions, references, sources):
    return ["high"] * len(predictions)

number = 3
"""
PLACES = ["t:1", "t:2"]
SAMPLES = [["a", "bb"], [["x"], ["y", "z"]], ["1234", "123456"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("own")
    (home / "own_scores.py").write_text(MODULE)
    (home / "own_broken.py").write_text("import no_such_package\n")
    (home / "own_exits.py").write_text("import sys\n\nsys.exit(0)\n")
    return home


def _score(folder, function, *samples, **more):
    return score_custom_metric(load_custom_metric(f"own_scores:{function}", folder), *samples, PLACES, **more)


def test_values_of_examples_are_averaged_and_tested_in_pairs(folder):
    score = _score(folder, "lengths", *SAMPLES, greater_is_better=False)
    assert (score.value, score.n, score.higher_is_better, score.ci95) == (-3.5, 2, False, None)
    assert _score(folder, "array", *SAMPLES).value == 0.5
    metric = load_custom_metric("own_scores:lengths", folder)
    rows = [["b" * at for at in range(n, n + 40)] for n in (1, 2)]
    texts = [["x"]] * 40, ["y" * (at % 7) for at in range(40)]
    one, two = (score_custom_metric(metric, row, *texts, PLACES * 20) for row in rows)
    values = np.array([len(row) - at % 7 for at, row in enumerate(rows[1])])
    assert two.value == pytest.approx(values.mean())
    drawn = np.random.default_rng(12345).integers(0, 40, size=(1000, 40))
    no_limits = (-math.inf, math.inf)
    expected = student_interval(two.value, values[drawn].mean(axis=1), 40, no_limits)
    assert two.ci95 == pytest.approx(expected)
    found = compare_steps(two.statistics, one.statistics)
    assert found["difference"] == pytest.approx(1)
    assert found["p_value"] < 0.05


def test_a_number_of_the_whole_set_has_no_interval_and_is_never_significant(folder):
    one = _score(folder, "whole", *SAMPLES)
    assert (one.value, one.n, one.ci95) == (3, 2, None)
    other = _score(folder, "whole", ["a", "b"], *SAMPLES[1:])
    found = compare_steps(one.statistics, other.statistics)
    assert (found["difference"], found["p_value"], found["ci95"]) == (1, 1, None)


@pytest.mark.parametrize(
    ("function", "code", "named"),
    [
        ("fails", "metric-failed", "t:2"),
        ("fails_together", "metric-failed", "ZeroDivisionError"),
        ("nan", "metric-not-finite", "t:2"),
        ("huge_integer", "metric-not-finite", "t:1"),
        ("large", "metric-too-large", "1e+308"),
        ("exits", "metric-failed", "SystemExit"),
        ("short", "wrong-metric-result", "2 examples"),
        ("text", "wrong-metric-result", "'high'"),
    ],
)
def test_a_wrong_result_is_named_with_its_example(folder, function, code, named):
    predictions = ["a", ""] if function == "fails" else SAMPLES[0]
    with raises_code(code, InputError) as caught:
        _score(folder, function, predictions, *SAMPLES[1:])
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("own_missing:f", "metric-not-importable"),
        ("own_broken:f", "metric-not-importable"),
        ("own_exits:f", "metric-not-importable"),
        ("own_scores:length", "no-such-function"),
        ("own_scores:number", "no-such-function"),
    ],
)
def test_what_cannot_be_imported_is_refused(folder, name, code):
    with raises_code(code, InputError):
        load_custom_metric(name, folder)


def test_module_of_another_folder_with_the_same_name_is_imported(tmp_path):
    """One process may run two recipes, each with its custom metrics."""
    for value in (1, 2):
        (tmp_path / str(value)).mkdir()
        (tmp_path / str(value) / "own_same.py").write_text(f"def f(p, r, s): return {value}\n")
        metric = load_custom_metric("own_same:f", tmp_path / str(value))
        assert metric.function([], [], []) == value


@pytest.mark.parametrize(
    ("module", "metric", "helper"),
    [
        ("own_a", "from own_a_helper import V", "own_a_helper"),
        ("own_b.scores", "from own_b.helpers import V", "own_b.helpers"),  # without __init__.py
        ("own_c.scores", "from .helpers import V", "own_c.helpers"),
        ("own_d.scores", "import own_d.helpers as h; V = h.V", "own_d.helpers"),
    ],
)
def test_custom_metric_imports_current_modules_of_its_own_folder(tmp_path, module, metric, helper):
    """Else the score of another recipe, or of the functions before an edit, would be reported."""
    found = []
    for folder, value in (("one", 1), ("two", 22), ("two", 333), ("one", 1)):
        for name, text in ((module, f"{metric}\ndef f(*_): return V\n"), (helper, f"V = {value}\n")):
            path = (tmp_path / folder).joinpath(*name.split(".")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        loaded = load_custom_metric(f"{module}:f", tmp_path / folder)
        found.append((loaded.function(), loaded.source_hash))
    assert [value for value, _ in found] == [1, 22, 333, 1]
    assert found[0] == found[3]
    assert len({source for _, source in found}) == 3


def test_modules_of_python_and_of_an_environment_are_not_imported_again(tmp_path):
    """A second `sys` breaks the process, and numpy refuses to be loaded twice; the folder may hold both."""
    metric = load_custom_metric("sys:exit", tmp_path)
    assert sys.modules["sys"] is sys
    with raises_code("metric-failed", InputError):
        score_custom_metric(metric, *SAMPLES, PLACES)
    before = sys.modules["numpy"]
    load_custom_metric("numpy:mean", Path(np.__file__).parents[2])
    assert sys.modules["numpy"] is before


def test_copied_metrics_are_found_next_to_another_recipe(tmp_path):
    """With the modules of the recipe's folder that they import, and without installed packages."""
    home, target = tmp_path / "home", tmp_path / "target"
    (home / "own_package").mkdir(parents=True)
    (home / "own_package" / "__init__.py").write_text("")
    (home / "own_package" / "scores.py").write_text(
        "from own_helper import number\n"
        "def f(*_):\n    import own_late, random\n    return number + own_late.number\n"
    )
    (home / "own_late.py").write_text("number = 10\n")
    (home / "own_helper.py").write_text("number = 7\n")
    (home / "unused.py").write_text("")
    (home / "random.py").write_text("raise ValueError")  # is not that of Python
    assert load_custom_metric("own_package.scores:f", home).function() == 17
    copy_custom_metrics(["bleu", "own_package.scores:f", "math:hypot"], home, target)
    files = {path.relative_to(target).as_posix() for path in target.rglob("*.py")}
    assert files == {"own_package/__init__.py", "own_package/scores.py", "own_helper.py", "own_late.py"}
    command = "from own_package.scores import f; print(f())"
    output = subprocess.check_output([sys.executable, "-c", command], cwd=target, text=True)
    assert output.split() == ["17"]


def test_an_edited_module_is_imported_again(tmp_path):
    found = []
    for value in (1, 22):
        (tmp_path / "own_edited.py").write_text(f"def f(p, r, s): return {value}\n")
        metric = load_custom_metric("own_edited:f", tmp_path)
        found.append((metric.function([], [], []), metric.source_hash))
    assert [value for value, _ in found] == [1, 22]
    assert found[0][1] != found[1][1]


RECIPE = """
model: m
task: text-generation
data: {train: t.jsonl, validation: t.jsonl, test: t.jsonl, prompt_template: "{prompt}"}
stages:
  - finetune: {max_steps: 2, batch_size: 4, num_evals: 1, metric_for_best_model: "own_run:lengths"}
score:
  quality: [exact_match, {"own_run:lengths": {greater_is_better: false}}]
  generation: {max_new_tokens: 3}
  latency: false
gates: {"own_run:lengths": {max_drop: 100, max: -1000}}
"""


def test_a_run_scores_it_selects_by_it_and_gates_on_it(tmp_path):
    causal.write_model(tmp_path / "m", "gpt2")
    causal.write_prompts(tmp_path / "t.jsonl")
    (tmp_path / "own_run.py").write_text(MODULE)
    (tmp_path / "r.yaml").write_text(RECIPE)
    run = tmp_path / "run"
    harness.smelt("run", tmp_path / "r.yaml", "--out", run, "--quiet", code=3)
    assert (run / "own_run.py").read_text() == MODULE  # next to recipe.yaml, which names it
    assert "custom-metric-imported" in message_codes(load_plan(tmp_path / "r.yaml").notes)
    step = json.loads((run / "report.json").read_text())["steps"][1]
    data = ["--data", tmp_path / "t.jsonl", "--json", "--max-new-tokens", 3]
    result = harness.smelt("predict", run / step["artifact"], *data, code=0)
    said = [json.loads(line) for line in result.stdout.splitlines()]
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    lengths = [len(row["output"]) - len(text) for row, text in zip(said, prompts, strict=True)]
    score = step["quality"]["own_run:lengths"]
    assert score["value"] == pytest.approx(sum(lengths) / len(lengths))
    assert score["higher_is_better"] is False
    assert [(gate["kind"], gate["passed"]) for gate in step["gates"]] == [("max_drop", True), ("max", False)]
    before = json.loads((run / "report.json").read_text())["steps"][0]["quality"]["own_run:lengths"]
    assert step["details"]["training"]["validations"][0]["score"] == pytest.approx(before["value"])
    assert step["against_baseline"]["own_run:lengths"]["p_value_holm"] is not None
    (tmp_path / "own_run.py").write_text(MODULE.replace("len(p) - len(s)", "1 / (len(s) - len(s))"))
    error = command_error(harness.smelt("run", tmp_path / "r.yaml", "--out", run, "--quiet", code=2))
    assert error.code == "metric-failed"
    assert "t.jsonl:1" in str(error)
    (tmp_path / "own_run.py").write_text("")
    error = command_error(harness.smelt("plan", tmp_path / "r.yaml", code=2))
    assert [(one.code, one.setting) for one in error.found] == [("no-such-function", "score.quality[1]")]
