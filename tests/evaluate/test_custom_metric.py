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
from smelt.core.user_code import copy_user_code
from smelt.evaluate.custom_metric import load_custom_metric, score_custom_metric
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
    module_folder = tmp_path_factory.mktemp("own")
    (module_folder / "own_scores.py").write_text(MODULE)
    (module_folder / "own_broken.py").write_text("import no_such_package\n")
    (module_folder / "own_exits.py").write_text("import sys\n\nsys.exit(0)\n")
    return module_folder


def _score(folder, function, *samples, **more):
    return score_custom_metric(load_custom_metric(f"own_scores:{function}", folder), *samples, PLACES, **more)


def test_example_values_are_averaged_and_compared_in_pairs(folder):
    score = _score(folder, "lengths", *SAMPLES, greater_is_better=False)
    assert (score.value, score.n, score.higher_is_better, score.ci95) == (-3.5, 2, False, None)
    assert _score(folder, "array", *SAMPLES).value == 0.5
    metric = load_custom_metric("own_scores:lengths", folder)
    output_rows = [["b" * row_index for row_index in range(n, n + 40)] for n in (1, 2)]
    texts = [["x"]] * 40, ["y" * (row_index % 7) for row_index in range(40)]
    first_score, second_score = (score_custom_metric(metric, row, *texts, PLACES * 20) for row in output_rows)
    values = np.array([len(row) - row_index % 7 for row_index, row in enumerate(output_rows[1])])
    assert second_score.value == pytest.approx(values.mean())
    resampled = np.random.default_rng(12345).integers(0, 40, size=(1000, 40))
    no_limits = (-math.inf, math.inf)
    expected = student_interval(second_score.value, values[resampled].mean(axis=1), 40, no_limits)
    assert second_score.ci95 == pytest.approx(expected)
    comparison = compare_steps(second_score.statistics, first_score.statistics)
    assert comparison["difference"] == pytest.approx(1)
    assert comparison["p_value"] < 0.05


def test_corpus_value_has_no_interval_and_is_never_significant(folder):
    first_score = _score(folder, "whole", *SAMPLES)
    assert (first_score.value, first_score.n, first_score.ci95) == (3, 2, None)
    other = _score(folder, "whole", ["a", "b"], *SAMPLES[1:])
    comparison = compare_steps(first_score.statistics, other.statistics)
    assert (comparison["difference"], comparison["p_value"], comparison["ci95"]) == (1, 1, None)


@pytest.mark.parametrize(("function", "code", "named"), [
    ("fails", "metric-failed", "t:2"), ("fails_together", "metric-failed", "ZeroDivisionError"),
    ("nan", "metric-not-finite", "t:2"), ("huge_integer", "metric-not-finite", "t:1"),
    ("large", "metric-too-large", "1e+308"), ("exits", "metric-failed", "SystemExit"),
    ("short", "wrong-metric-result", "2 examples"), ("text", "wrong-metric-result", "'high'"),
])  # fmt: skip
def test_invalid_result_error_names_example(folder, function, code, named):
    predictions = ["a", ""] if function == "fails" else SAMPLES[0]
    with raises_code(code, InputError) as excinfo:
        _score(folder, function, predictions, *SAMPLES[1:])
    assert named in str(excinfo.value)


@pytest.mark.parametrize(("name", "code"), [
    ("own_missing:f", "metric-not-importable"), ("own_broken:f", "metric-not-importable"),
    ("own_exits:f", "metric-not-importable"), ("own_scores:length", "no-such-function"),
    ("own_scores:number", "no-such-function"),
])  # fmt: skip
def test_unimportable_metric_is_rejected(folder, name, code):
    with raises_code(code, InputError):
        load_custom_metric(name, folder)


def test_module_with_the_same_name_in_another_folder_is_imported(tmp_path):
    """One process may run two recipes, each with its custom metrics."""
    for value in (1, 2):
        (tmp_path / str(value)).mkdir()
        (tmp_path / str(value) / "own_same.py").write_text(f"def f(p, r, s): return {value}\n")
        metric = load_custom_metric("own_same:f", tmp_path / str(value))
        assert metric.function([], [], []) == value


@pytest.mark.parametrize(("module", "metric", "helper"), [
    ("own_a", "from own_a_helper import V", "own_a_helper"),
    ("own_b.scores", "from own_b.helpers import V", "own_b.helpers"),  # without __init__.py
    ("own_c.scores", "from .helpers import V", "own_c.helpers"),
    ("own_d.scores", "import own_d.helpers as h; V = h.V", "own_d.helpers"),
])  # fmt: skip
def test_custom_metric_imports_current_modules_of_its_own_folder(tmp_path, module, metric, helper):
    """Else the score of another recipe, or of the functions before an edit, would be reported."""
    loaded_metrics = []
    for folder, value in (("one", 1), ("two", 22), ("two", 333), ("one", 1)):
        for name, text in ((module, f"{metric}\ndef f(*_): return V\n"), (helper, f"V = {value}\n")):
            path = (tmp_path / folder).joinpath(*name.split(".")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        loaded = load_custom_metric(f"{module}:f", tmp_path / folder)
        loaded_metrics.append((loaded.function(), loaded.source_hash))
    assert [value for value, _ in loaded_metrics] == [1, 22, 333, 1]
    assert loaded_metrics[0] == loaded_metrics[3]
    assert len({source for _, source in loaded_metrics}) == 3


def test_installed_modules_are_not_reimported(tmp_path):
    """A second `sys` breaks the process, and numpy refuses to be loaded twice; the folder may hold both."""
    metric = load_custom_metric("sys:exit", tmp_path)
    assert sys.modules["sys"] is sys
    with raises_code("metric-failed", InputError):
        score_custom_metric(metric, *SAMPLES, PLACES)
    loaded_numpy = sys.modules["numpy"]
    load_custom_metric("numpy:mean", Path(np.__file__).parents[2])
    assert sys.modules["numpy"] is loaded_numpy


def test_copied_metrics_are_found_next_to_another_recipe(tmp_path):
    """With the modules of the recipe's folder that they import, and without installed packages."""
    source_folder, target = tmp_path / "home", tmp_path / "target"
    (source_folder / "own_package").mkdir(parents=True)
    (source_folder / "own_package" / "__init__.py").write_text("")
    (source_folder / "own_package" / "scores.py").write_text(
        "from own_helper import number\n"
        "def f(*_):\n    import own_late, random\n    return number + own_late.number\n"
    )
    (source_folder / "own_late.py").write_text("number = 10\n")
    (source_folder / "own_helper.py").write_text("number = 7\n")
    (source_folder / "unused.py").write_text("")
    (source_folder / "random.py").write_text("raise ValueError")  # is not that of Python
    assert load_custom_metric("own_package.scores:f", source_folder).function() == 17
    copy_user_code(["own_package.scores:f", "math:hypot"], source_folder, target)
    files = {path.relative_to(target).as_posix() for path in target.rglob("*.py")}
    assert files == {"own_package/__init__.py", "own_package/scores.py", "own_helper.py", "own_late.py"}
    command = "from own_package.scores import f; print(f())"
    output = subprocess.check_output([sys.executable, "-c", command], cwd=target, text=True)
    assert output.split() == ["17"]


def test_edited_module_is_reimported(tmp_path):
    loaded_metrics = []
    for value in (1, 22):
        (tmp_path / "own_edited.py").write_text(f"def f(p, r, s): return {value}\n")
        metric = load_custom_metric("own_edited:f", tmp_path)
        loaded_metrics.append((metric.function([], [], []), metric.source_hash))
    assert [value for value, _ in loaded_metrics] == [1, 22]
    assert loaded_metrics[0][1] != loaded_metrics[1][1]


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
gates: {"own_run:lengths": {max_degradation: 100, max: -1000}}
"""


def test_run_scores_selects_and_gates_by_custom_metric(tmp_path):
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
    output_rows = [json.loads(line) for line in result.stdout.splitlines()]
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    lengths = [len(row["output"]) - len(text) for row, text in zip(output_rows, prompts, strict=True)]
    score = step["quality"]["own_run:lengths"]
    assert score["value"] == pytest.approx(sum(lengths) / len(lengths))
    assert score["higher_is_better"] is False
    assert [(gate["kind"], gate["passed"]) for gate in step["gates"]] == [
        ("max_degradation", True),
        ("max", False),
    ]
    first_score = json.loads((run / "report.json").read_text())["steps"][0]["quality"]["own_run:lengths"]
    assert step["details"]["training"]["validations"][0]["score"] == pytest.approx(first_score["value"])
    assert step["against_baseline"]["own_run:lengths"]["p_value_holm"] is not None
    (tmp_path / "own_run.py").write_text(MODULE.replace("len(p) - len(s)", "1 / (len(s) - len(s))"))
    error = command_error(harness.smelt("run", tmp_path / "r.yaml", "--out", run, "--quiet", code=2))
    assert error.code == "metric-failed"
    assert "t.jsonl:1" in str(error)
    (tmp_path / "own_run.py").write_text("")
    error = command_error(harness.smelt("plan", tmp_path / "r.yaml", code=2))
    assert [(error_entry.code, error_entry.setting) for error_entry in error.messages] == [
        ("no-such-function", "score.quality[1]")
    ]
