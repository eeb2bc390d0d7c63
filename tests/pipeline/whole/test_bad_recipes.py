"""Recipes that cannot be: each is refused in words, with exit code 2, before any work."""

import json
import shutil

import pytest

from tests.support import harness
from tests.support.expected_errors import command_error, message_locations
from tests.support.models import every_family
from tests.support.standins.invalid_recipes import RECIPE, RECIPE_HEAD, assert_refused

pytestmark = pytest.mark.quick

pytest_plugins = ["tests.support.standins.invalid_recipes"]


@pytest.mark.parametrize(("stages", "code", "setting", "named"), [
    ("[{prune: [1]}]", "wrong-value", "stages[0].prune", ("[1]",)),
    ("prune", "wrong-value", "stages", ("'prune'",)),
    ("[{distill: {student: {decoder_layers: 1}}}]", "unknown-stack",
     "stages[0].distill.student.decoder_layers", ("bert", "layers")),
    ("[{distill: {student: {layers: 3}}}]", "more-than-model-has", "stages[0].distill.student.layers",
     ("3 ", "2")),
    ("[{distill: {student: {layers: [1, 0]}}}]", "wrong-layer-numbers", "stages[0].distill.student.layers",
     ("[1, 0]",)),
    ("[{distill: {student: {layers: 1}}}, prune, {distill: {student: {layers: 2}}}]", "more-than-model-has",
     "stages[2].distill.student.layers", ("2 ", "1")),
])  # fmt: skip
def test_invalid_stages_are_rejected(home, stages, code, setting, named):
    error = assert_refused(home, f"{RECIPE_HEAD}stages: {stages}\n", code)
    assert message_locations(error.messages) == [(code, setting, 4)]
    assert [value for value in named if value not in str(error)] == []


@pytest.mark.parametrize(("family", "stages", "code", "setting", "named"), [
    ("mpnet", "[{prune: {targets: [heads]}}]", "fixed-heads", "stages[0].prune.targets", ("mpnet",)),
    ("modernbert", "[{distill: {student: {layers: [1]}}}]", "first-layer-required",
     "stages[0].distill.student.layers", ("modernbert",)),
    ("bert", "[{prune: {budget: {flops: 0.6, sequence_length: 4000}}}]", "longer-than-model",
     "stages[0].prune.budget.sequence_length", ("4,000", "32")),
])  # fmt: skip
def test_stages_unsupported_by_family_are_rejected(home, family, stages, code, setting, named):
    shutil.copytree(every_family.model_with_layers(family, 1 if family == "bert" else 2), home / "other")
    recipe = f"{RECIPE_HEAD}stages: {stages}\n".replace("model: m", "model: other")
    error = assert_refused(home, recipe, code)
    assert message_locations(error.messages) == [(code, setting, 4)]
    assert [value for value in named if value not in str(error)] == []


EVERYTHING_WRONG = """\
modle: x
model: m
task: text-classification
data:
  train: train.csv
  validation: validation.jsonl
  test: data.jsno
  split: {test: 2}
  windows: {length: 8}
stages:
  - prune: {keep_ratio: 2, importnce: taylor}
  - distill: {student: {decoder_layers: 1}, epochs: half, teacher: nobody}
    name: small
  - onnx: {target: tensort}
    from: smal
  - prnue: {}
  - quantize: {scheme: int8-dynamc}
    from: small
  - factorize: {}
  - tensorrt: {}
  - finetune: {epochs: 1}
    name: small
score:
  quality: [accuracy, f2, accuracy]
  latency: {threads: 0}
  generation: {num_beams: 0}
baseline: smal
gates:
  accuracy: {max_degradation: -1, at: nobody}
  mse: {min: 3}
  speedup: {max: 3}
  size_bytes: {}
seed: 1.5
device: cud
threads: many
"""


# Code and setting of each, by the line that it stands in.
ITS_MISTAKES = [
    ("unknown-setting", "modle", 1), ("missing-tokenizer", "model", 2), ("unknown-label", "data.train", 5),
    ("wrong-column-type", "data.validation", 6), ("invalid-json", "data.validation", 6),
    ("missing-file", "data.test", 7), ("wrong-value", "data.split.test", 8),
    ("does-not-fit-task", "data.windows", 9), ("wrong-value", "stages[0].prune.keep_ratio", 11),
    ("unknown-setting", "stages[0].prune.importnce", 11),
    ("unknown-stack", "stages[1].distill.student.decoder_layers", 12),
    ("wrong-value", "stages[1].distill.epochs", 12), ("unknown-step", "stages[1].distill.teacher", 12),
    ("wrong-value", "stages[2].onnx.target", 14), ("unknown-step", "stages[2].from", 15),
    ("unknown-stage", "stages[3].prnue", 16), ("wrong-value", "stages[4].quantize.scheme", 17),
    ("already-quantized", "stages[5].factorize", 19), ("wrong-model-format", "stages[6].tensorrt", 20),
    ("duplicate-step", "stages[7].name", 22), ("unknown-metric", "score.quality[1]", 24),
    ("duplicate-metric", "score.quality[2]", 24), ("wrong-value", "score.latency.threads", 25),
    ("wrong-value", "score.generation.num_beams", 26), ("unknown-step", "baseline", 27),
    ("wrong-value", "gates.accuracy.max_degradation", 29), ("unknown-step", "gates.accuracy.at", 29),
    ("does-not-fit-metric", "gates.mse.min", 30), ("does-not-fit-metric", "gates.speedup.max", 31),
    ("missing-setting", "gates.size_bytes", 32), ("wrong-value", "seed", 33), ("wrong-value", "device", 34),
    ("wrong-value", "threads", 35), ("invalid-override", "--set prune.x", None),
    ("unknown-setting", "--set nobody.keep_ratio=1", None), ("unknown-step", "--until", None),
]  # fmt: skip


def test_all_recipe_errors_are_reported_at_once(home):
    """One error of every kind. Whoever mends what is said here has a recipe that plans."""
    (home / "train.csv").write_text("text;label\na;0\nb;seven\n")
    (home / "validation.jsonl").write_text('{"text": "a", "label": 0}\n{"text": 7, "label": 1}\n{"text": \n')
    (home / "m" / "vocab.txt").unlink()
    (home / "m" / "tokenizer.json").unlink(missing_ok=True)
    (home / "recipe.yaml").write_text(EVERYTHING_WRONG)
    result = harness.smelt(
        "plan", home / "recipe.yaml", "--until", "nowhere", "--set", "prune.x", "--set", "nobody.keep_ratio=1"
    )  # fmt: skip
    error = command_error(result)
    assert (result.exit_code, error.code) == (2, "several-errors")
    assert sorted(message_locations(error.messages), key=str) == sorted(ITS_MISTAKES, key=str)
    lines = [line for _, _, line in message_locations(error.messages) if line is not None]
    assert lines == sorted(lines)
    output = result.output.removeprefix("error[several-errors]: ").splitlines()
    assert output == [str(message) for message in error.messages]


@pytest.mark.parametrize(("stage", "code", "named"), [
    ("prune: {targets: [ffn], keep_ratio: {heads: 0.5}}", "settings-conflict", ("heads", "[ffn]")),
    ("factorize: {include: []}", "wrong-value", ("at least 1", "[]")),
    ("factorize: {rank: 4, keep_ratio: 0.5}", "settings-conflict", ("rank and keep_ratio",)),
    ("sparsify: {pattern: '4:2'}", "wrong-pattern", ("4:2",)),
    ("sparsify: {pattern: '2:4', sparsity: 0.5}", "settings-conflict", ("sparsity", "pattern")),
    ("distill: {layer_map: last}", "unused-setting", ("layer_map", "hidden_states")),
    ("distill: {layer_reduction: mean}", "unused-setting", ("layer_reduction", "hidden_states")),
    ("distill: {relation_heads: 2}", "unused-setting", ("relation_heads", "self_attention_relations")),
    ("distill: {losses: {hidden_states: 1}, layer_map: {1: 9}}", "unknown-layer", ("0 (",)),
    ("distill: {phases: [{losses: {logits: 1}}, {losses: {cosine: 1}}], student: {config: thin.json}}",
     "width-mismatch", ("32", "16")),
])  # fmt: skip
def test_conflicting_settings_give_one_message(home, stage, code, named):
    config = json.loads((home / "m" / "config.json").read_text())
    (home / "thin.json").write_text(json.dumps(config | {"hidden_size": 16}))
    error = assert_refused(home, RECIPE.replace("prune: {keep_ratio: 0.5}", stage), code)
    [error_message] = error.messages
    assert error_message.line == 4
    assert [value for value in named if value not in error_message.message] == []


def test_errors_of_different_parts_do_not_hide_each_other(home):
    (home / "data.jsonl").write_text('{"text": "a", "label": 0}\n{"text": \n')
    (home / "m" / "model.safetensors").unlink()
    assert_refused(
        home,
        RECIPE.replace("prune", "prnue").replace("test: data", "test: date") + "seed: -1\n",
        "missing-weights", "invalid-json", "missing-file", "unknown-stage", "wrong-value",
    )  # fmt: skip
    # without a task the rows cannot be read, but their files can be looked for
    broken = RECIPE.replace("text-cl", "txt-cl").replace("test: data", "test: date")
    assert_refused(home, broken, "missing-weights", "unknown-task", "missing-file")
