"""Techniques that cannot do what a recipe asks of this model: said in words, with what would do."""

import json
import shutil

import harness
import pytest
from refused_recipes import HEAD

from smelt.compress.distill.logits import Distill, DistillSettings
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.core import packages

pytest_plugins = ["refused_recipes"]

# by the name of a step: the stage, and what its error says
AT_WORK = {
    "heads": (
        "prune: {budget: {parameters: 0.001}, rows: 4}",
        ("0.001 of the model's parameters cannot be reached", "Say at least 0."),
    ),
    "ranks": (
        "factorize: {budget: {parameters: 0.00001}, aim: size, rows: 4}",
        ("is less than rank 1 leaves where a pair gains", "Say at least 0."),
    ),
    "words": ("vocabulary: {size: 1}", ("size 1 is less than the", "Give a larger size.")),
    "layers": ("factorize: {include: ['*.nowhere']}", ("choose no linear layer",)),
    "codes": ("quantize: {skip: ['*']}", ("the patterns in skip ['*'] leave no layer to quantize",)),
    "teacher": (
        "distill: {teacher: {model: other}, max_steps: 1}",
        ("the tokenizer of the teacher", "is another one than the model's", "are given the same tokens"),
    ),
}


def test_what_only_the_work_can_tell_is_told_of_each_step_and_others_go_on(home):
    shutil.copytree(home / "m", home / "other")
    words = (home / "other" / "vocab.txt").read_text().splitlines()
    (home / "other" / "vocab.txt").write_text("\n".join([*words[:-2], words[-1], words[-2]]) + "\n")
    steps = "".join(
        f"  - {stage}\n    name: {name}\n    from: model\n" for name, (stage, _) in AT_WORK.items()
    )
    data = "data: {train: data.jsonl, validation: data.jsonl, test: data.jsonl}\n"
    text = HEAD.replace("data: {train: data.jsonl, test: data.jsonl}\n", data)
    (home / "recipe.yaml").write_text(
        f"{text}score: {{latency: false}}\nstages:\n{steps}  - depth: {{layers: 1, importance: last}}\n"
        "    from: model\n"
    )
    harness.smelt("run", home / "recipe.yaml", "--out", home / "run", code=1)
    told = {step["name"]: step for step in json.loads((home / "run" / "report.json").read_text())["steps"]}
    for name, (_, words) in AT_WORK.items():
        assert told[name]["status"] == "error", name
        assert all(word in told[name]["error"] for word in words), told[name]["error"]
    assert told["depth"]["status"] == "done"


@pytest.mark.parametrize(
    ("stage", "package", "there"),
    [
        ("finetune: {lora: {rank: 2}}", "peft", "0.17.9"),
        ("quantize: {scheme: bnb-nf4}", "bitsandbytes", "0.41.0"),
    ],
)
def test_an_older_package_is_named_before_any_work(home, monkeypatch, stage, package, there):
    found = packages.version
    monkeypatch.setattr(packages, "version", lambda name: there if name == package else found(name))
    (home / "recipe.yaml").write_text(f"{HEAD}stages: [{{{stage}}}]\n")
    said = harness.smelt("run", home / "recipe.yaml", "--out", home / "run", code=2).output
    assert f"or later is needed, and {there} is installed" in said
    assert f"pip install '{package}>=" in said
    assert not (home / "run").exists()


@pytest.mark.parametrize("word", ["lora", "masks", "sparsify"])
@pytest.mark.parametrize(("stage", "settings"), [(Finetune, FinetuneSettings), (Distill, DistillSettings)])
def test_what_trains_in_blocks_is_refused_of_a_model_that_has_none(stage, settings, word):
    asked = settings.model_validate({word: {}})
    ((setting, said),), _ = stage.check_model(asked, {"model_type": "resnet"})
    assert setting == word
    assert said.startswith("a resnet model has convolutions and no blocks")
    assert stage.check_model(asked, {"model_type": "bert"})[0] == []
