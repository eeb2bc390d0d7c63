"""Plans: the tree of steps, what is checked before work starts, and how it is shown."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smelt.core.errors import InputError
from smelt.pipeline.plan import load_plan as load_plan_module
from smelt.pipeline.plan.load_plan import load_plan
from smelt.pipeline.recipe import stages as stage_table
from tests.support.standins.stage_stand_ins import RECIPE_HEAD, STAGE_TREE, plan_errors, plan_stages

pytest_plugins = ["tests.support.standins.stage_stand_ins"]
pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("stand_ins")]


def test_steps_form_tree_with_unique_names(folder: Path) -> None:
    plan = plan_stages(folder, STAGE_TREE)
    assert [(s.name, s.stage, s.parent) for s in plan.steps] == [
        ("distill", "distill", "model"),
        ("prune", "prune", "distill"),
        ("prune-2", "prune", "prune"),
        ("small", "factorize", "prune-2"),
        ("quantize", "quantize", "small"),
        ("onnx-int8", "onnx", "quantize"),
        ("onnx", "onnx", "small"),
        ("tensorrt", "tensorrt", "onnx"),
    ]
    assert plan.step("prune").settings.model_dump()["keep_ratio"] == 0.25
    assert plan.step("onnx").format == "onnx"
    assert [s.name for s in plan.children("small")] == ["quantize", "onnx"]
    assert plan.model_folder == folder / "model"
    assert plan.warnings == ()


def test_automatic_names_avoid_given_names(folder: Path) -> None:
    plan = plan_stages(folder, "[prune, {prune: {}, name: prune-2}, prune]")
    assert [s.name for s in plan.steps] == ["prune", "prune-2", "prune-3"]


def test_until_keeps_required_steps(folder: Path) -> None:
    plan = plan_stages(folder, STAGE_TREE, until="onnx")
    assert [s.name for s in plan.steps] == ["distill", "prune", "prune-2", "small", "onnx"]
    assert plan.excluded_names == ("quantize", "onnx-int8", "tensorrt")
    assert plan.gates[0].at == ("onnx",)
    assert plan_stages(folder, STAGE_TREE, until="model").steps == ()
    [error] = plan_errors(folder, STAGE_TREE, until="onix")
    assert (error.code, error.setting) == ("unknown-step", "--until")
    step_names = "model, distill, prune, prune-2, small, quantize, onnx-int8, onnx, tensorrt"
    assert all(value in error.message for value in ("'onix'", step_names, "'onnx'?"))


def test_step_depends_on_steps_named_in_settings(folder: Path) -> None:
    stages = "[{finetune: {}, name: tuned}, {prune: {}, from: model}, {distill: {teacher: tuned}}, onnx]"
    plan = plan_stages(folder, stages, until="distill")
    assert [s.name for s in plan.steps] == ["tuned", "prune", "distill"]
    assert plan.step("distill").dependencies == ("prune", "tuned")
    assert plan.step("prune").dependencies == ("model",)


def test_overrides_are_applied_and_saved_in_portable_recipe(folder: Path) -> None:
    plan = plan_stages(folder, STAGE_TREE, "prune-2.keep_ratio=0.9", "seed=4")
    assert plan.step("prune-2").settings.model_dump()["keep_ratio"] == 0.9
    assert plan.recipe.seed == 4
    assert plan.recipe_dict()["seed"] == 4
    assert "seed: 4" in plan.portable_recipe()


_WORDS = st.sampled_from(["model", "test.jsonl", "prune", "onnx", "~nobody/x", "a" * 300, "x\0y", "..", ""])


_STEP = st.dictionaries(
    st.sampled_from([*stage_table.STAGE_CLASSES, "name", "from", "optional"]),
    _WORDS | st.none() | st.booleans() | st.dictionaries(st.sampled_from(["keep", "target"]), _WORDS),
    max_size=3,
)


@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(_WORDS, _WORDS, st.lists(_STEP, max_size=4), _WORDS, _WORDS)
def test_any_recipe_is_planned_or_raises_input_error(
    tmp_path_factory: pytest.TempPathFactory,
    model: str,
    test: str,
    steps: list[Any],
    baseline: str,
    until: str,
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    recipe = {
        "model": model,
        "task": "translation",
        "data": {"test": test},
        "stages": steps,
        "baseline": baseline,
    }
    path.write_text(json.dumps(recipe))
    # anything but an InputError ends the test
    with contextlib.suppress(InputError):
        assert load_plan(path, (), until).path == path


def test_plan_imports_no_heavy_packages(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(RECIPE_HEAD + "stages: []\n")
    code = (
        "import sys; from pathlib import Path; from smelt.pipeline.plan.load_plan import load_plan;"
        f"str(load_plan(Path({str(folder / 'recipe.yaml')!r})));"
        "sys.exit(' '.join({'torch', 'transformers', 'onnx', 'onnxruntime', 'datasets', 'sklearn'} & set(sys.modules)))"  # noqa: E501
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_checks_in_reverse_order_report_the_same_errors(folder: Path, monkeypatch) -> None:
    """Checks only read what the readers have put into the context."""
    stages = "[{prune: {}, from: model}, {onnx: {}}]\nbaseline: nothing\ndevice: cuda\n"
    stages += "score: {latency: {steps: [other]}, quality: [meteor, chrf]}"
    head = "model: model\ntask: translation\n"
    head += "data: {train: train.jsonl, test: test.jsonl, prompt_template: '{prompt}'}\n"
    errors = plan_errors(folder, stages, head=head)
    assert len(errors) >= 4
    monkeypatch.setattr(load_plan_module, "CHECKS", load_plan_module.CHECKS[::-1])
    assert set(plan_errors(folder, stages, head=head)) == set(errors)
