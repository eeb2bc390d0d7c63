"""Techniques that cannot do what a recipe asks of this model: said in words, with what would do."""

import json

import pytest

from smelt.compress.distill.stage import Distill, DistillSettings
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.core import system
from tests.support import harness
from tests.support.expected_errors import command_error
from tests.support.standins.invalid_recipes import RECIPE_HEAD

pytest_plugins = ["tests.support.standins.invalid_recipes"]

# by the name of a step: the stage, the code of its error, and what is named in it
AT_WORK = {
    "heads": ("prune: {budget: {flops: 0.001}, calibration_samples: 4}", "budget-too-small",
        ("0.001", "0.")),
    "ranks": ("factorize: {parameter_budget: 0.00001, optimize_for: size, calibration_samples: 4}",
        "budget-too-small", ("rank 1", "0.")),
    "words": ("trim-vocabulary: {size: 1}", "size-too-small", ("size 1 ",)),
    "layers": ("factorize: {include: ['*.nowhere']}", "no-layer-selected", ("*.nowhere",)),
    "codes": ("quantize: {exclude: ['*']}", "no-layer-selected", ("['*']",)),
}  # fmt: skip


def test_runtime_errors_fail_only_their_step(home):
    steps = "".join(
        f"  - {stage}\n    name: {name}\n    from: model\n" for name, (stage, *_) in AT_WORK.items()
    )
    data = "data: {train: data.jsonl, validation: data.jsonl, test: data.jsonl}\n"
    text = RECIPE_HEAD.replace("data: {train: data.jsonl, test: data.jsonl}\n", data)
    (home / "recipe.yaml").write_text(
        f"{text}score: {{latency: false}}\nstages:\n{steps}  - drop-layers: {{layers: 1, importance: last}}\n"
        "    from: model\n"
    )
    harness.smelt("run", home / "recipe.yaml", "--out", home / "run", code=1)
    content = {step["name"]: step for step in json.loads((home / "run" / "report.json").read_text())["steps"]}
    errors = {name: content[name]["error"]["code"] for name in AT_WORK}
    assert errors == {name: code for name, (_, code, _) in AT_WORK.items()}
    for name, (_, _, fragments) in AT_WORK.items():
        assert content[name]["status"] == "error", name
        assert [value for value in fragments if value not in content[name]["error"]["message"]] == []
    assert content["drop-layers"]["status"] == "done"


@pytest.mark.parametrize(("stage", "package", "there"), [
    ("finetune: {lora: {r: 2}}", "peft", "0.17.9"),
    ("quantize: {scheme: bnb-nf4}", "bitsandbytes", "0.41.0"),
])  # fmt: skip
def test_outdated_package_is_reported_before_run(home, monkeypatch, stage, package, there):
    original = system.installed_version
    monkeypatch.setattr(
        system, "installed_version", lambda name: there if name == package else original(name)
    )
    (home / "recipe.yaml").write_text(f"{RECIPE_HEAD}stages: [{{{stage}}}]\n")
    error = command_error(harness.smelt("run", home / "recipe.yaml", "--out", home / "run", code=2))
    assert error.code == "step-unavailable"
    assert all(value in str(error) for value in (there, f"pip install '{package}>="))
    assert not (home / "run").exists()


@pytest.mark.parametrize("setting", ["lora", "learned_masks", "sparsify"])
@pytest.mark.parametrize(("stage", "settings"), [(Finetune, FinetuneSettings), (Distill, DistillSettings)])
def test_block_wise_training_is_rejected_for_model_without_blocks(stage, settings, setting):
    parsed = settings.model_validate({setting: {}})
    (error,), _ = stage.check_model(parsed, {"model_type": "resnet"})
    assert (error.code, error.setting) == ("does-not-fit-model", setting)
    assert "resnet" in error.message
    assert stage.check_model(parsed, {"model_type": "bert"})[0] == []
