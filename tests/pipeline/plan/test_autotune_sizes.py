"""For which batch sizes and beams a recipe's operators are chosen."""

import pytest

from smelt.pipeline.plan.load_plan import load_plan
from tests.support.models import tiny

RECIPE = """
model: m
task: translation
data: {{validation: data.jsonl, test: data.jsonl}}
stages:
  - quantize: {{scheme: int8-dynamic}}
  - onnx: {{autotune: {autotune}}}
score: {{quality: [bleu], latency: {latency}, generation: {generation}}}
"""
TIMED = "{batch_sizes: [1, 32]}"


@pytest.mark.parametrize(
    ("autotune", "latency", "generation", "sizes", "beams"),
    [
        ("true", TIMED, "{num_beams: 4}", (1, 32), 4),
        ("true", "{}", "{}", (1, 8), 1),
        ("true", "false", "{}", (1,), 1),
        ("{batch_sizes: [2]}", TIMED, "{num_beams: 4}", (2,), 4),
        ("{num_beams: 1}", TIMED, "{num_beams: 4}", (1, 32), 1),
    ],
)
def test_operators_are_chosen_for_timed_batch_sizes(tmp_path, autotune, latency, generation, sizes, beams):
    tiny.write_marian(tmp_path / "m")
    tiny.write_pairs(tmp_path / "data.jsonl", 4)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(autotune=autotune, latency=latency, generation=generation))
    settings = load_plan(recipe).step("onnx").settings.autotune_settings
    assert (settings.batch_sizes, settings.num_beams) == (sizes, beams)


def test_export_without_autotune_is_unchanged(tmp_path):
    tiny.write_marian(tmp_path / "m")
    tiny.write_pairs(tmp_path / "data.jsonl", 4)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(autotune="false", latency=TIMED, generation="{}"))
    assert load_plan(recipe).step("onnx").settings.autotune is False
