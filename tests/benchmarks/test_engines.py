"""engines.py: its recipes are ones that the plan accepts, for a GPU and where engines are only built."""

import engines
import pytest

from smelt.core.errors import InputError
from smelt.pipeline.plan.load_plan import load_plan
from smelt.pipeline.recipe.yaml_file import dump_yaml
from tests.support.expected_errors import raises_code
from tests.support.models import tiny
from tests.support.parsed_recipes import parse_recipe


@pytest.mark.parametrize("task", engines.TASKS)
@pytest.mark.parametrize("build", [False, True])
def test_every_variant_is_a_branch_ending_in_an_engine(task, build, tmp_path):
    written = tmp_path / "recipe.yaml"
    written.write_text(dump_yaml(engines.recipe_of(task, tmp_path, build)))
    recipe = parse_recipe(written.read_text(), written)
    stages = {stage.name: stage for stage in recipe.stages}
    assert [name for name in stages if stages[name].stage == "tensorrt"] == list(engines.ARMS)
    assert recipe.baseline == ("model" if build else "fp32")
    assert recipe.device == ("cpu" if build else "cuda")


def test_plan_has_quantization_and_precision_of_every_variant(tmp_path, monkeypatch):
    """What TensorRT does not run is refused here, not on a machine with a GPU."""
    tiny.write_marian(tmp_path / "model")
    for split in ("train", "validation", "test"):
        tiny.write_pairs(tmp_path / f"{split}.jsonl")
    monkeypatch.setattr(engines, "data_of", lambda task, split: tmp_path / f"{split}.jsonl")
    recipe = engines.recipe_of("translation", tmp_path / "model", build=True)
    written = tmp_path / "recipe.yaml"
    written.write_text(dump_yaml(recipe))
    plan = load_plan(written)
    assert {step.name for step in plan.steps} >= set(engines.ARMS)
    graphs = next(stage for stage in recipe["stages"] if stage["name"] == "int4-fp16-graphs")
    graphs["onnx"]["dtype"] = "bf16"
    written.write_text(dump_yaml(recipe))
    with raises_code("low-precision-scales", InputError):
        load_plan(written)


def test_float32_engine_is_the_timing_baseline():
    recipe = engines.recipe_of("translation", engines.Path("model"))
    base = next(stage for stage in recipe["stages"] if stage["name"] == recipe["baseline"])
    assert base["tensorrt"]["tf32"] is False
    assert recipe["score"]["latency"]["batch_sizes"] == [1, 8, 32]
    assert [part["opt_batch_size"] for part in base["tensorrt"]["profiles"]] == [1, 8, 32]
    # without it nothing is compared; of the others each may fail alone
    assert not base["optional"]
    assert all(stage["optional"] for stage in recipe["stages"] if not stage["name"].startswith("fp32"))
