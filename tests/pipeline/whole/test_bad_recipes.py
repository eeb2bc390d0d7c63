"""Recipes that cannot be: each is refused in words, with exit code 2, before any work."""

import json
import shutil
import time

import every_family
import harness
import pytest
from refused_recipes import HEAD, RECIPE, refused

pytest_plugins = ["refused_recipes"]

# Nine lines that stand for a billion words.
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ("[prnue]", ("recipe.yaml:4: ", "unknown stage 'prnue'", "Did you mean 'prune'?")),
        ("[{prune: {kep: 1}}]", ("stages[0].prune.kep: unknown", "Did you mean 'keep'?")),
        ("[{prune: {keep: half}}]", ("expected a number", "read 'half'")),
        ("[{prune: {keep: 1.5}}]", ("read 1.5",)),
        ("[{prune: [1]}]", ("expected a mapping of settings",)),
        ("[onnx, prune]", ("prune works on torch models, but its parent step 'onnx' gives onnx",)),
        ("[tensorrt]", ("tensorrt works on onnx models", "put one of these before it: onnx")),
        ("[quantize, factorize]", ("factorize cannot work after 'quantize'",)),
        ("prune", ("expected a list of stages",)),
        ("[{prune: {}, from: nowhere}]", ("no step 'nowhere'",)),
    ],
)
def test_stages_that_cannot_be(home, stages, words):
    refused(home, f"{HEAD}stages: {stages}\n", *words)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (
            "[{distill: {student: {decoder_layers: 1}}}]",
            ("stages[0].distill.student.decoder_layers: a bert model has no such stack; it has layers.",),
        ),
        ("[{distill: {student: {layers: 3}}}]", ("student.layers: the student cannot keep 3 layers of 2.",)),
        ("[{distill: {student: {layers: [1, 0]}}}]", ("expected rising numbers from 0 to 1, read [1, 0].",)),
        (
            "[{distill: {student: {layers: 1}}}, prune, {distill: {student: {layers: 2}}}]",
            ("stages[2].distill.student.layers: the student cannot keep 2 layers of 1.",),
        ),
    ],
)
def test_stages_that_do_not_fit_the_model(home, stages, words):
    refused(home, f"{HEAD}stages: {stages}\n", "recipe.yaml:4: ", *words)


@pytest.mark.parametrize(
    ("family", "stages", "words"),
    [
        (
            "mpnet",
            "[{prune: {what: [heads]}}]",
            "stages[0].prune.what: the heads of an mpnet model cannot be",
        ),
        (
            "modernbert",
            "[{distill: {student: {layers: [1]}}}]",
            "stages[0].distill.student.layers: a modernbert student keeps the first layer",
        ),
        (
            "bert",
            "[{prune: {budget: {operations: 0.6, length: 4000}}}]",
            "stages[0].prune.budget.length: 4,000 tokens, and the model has places for 32.",
        ),
    ],
)
def test_stages_that_do_not_fit_the_family(home, family, stages, words):
    shutil.copytree(every_family.of_layers(family, 1 if family == "bert" else 2), home / "other")
    recipe = f"{HEAD}stages: {stages}\n".replace("model: m", "model: other")
    refused(home, recipe, "recipe.yaml:4: ", words)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (RECIPE + "modle: m\n", ("modle: unknown key", "Did you mean 'model'?")),
        (RECIPE + "seed: soon\n", ("recipe.yaml:6: seed: expected a whole number", "read 'soon'")),
        (RECIPE.replace("text-cl", "txt-cl"), ("Did you mean 'text-classification'?",)),
        (RECIPE.replace("test: data", "test: date"), ("no such file", "Did you mean 'data.jsonl'?")),
        (RECIPE.replace("model: m", "model: n"), ("no such folder",)),
        ("model: [", ("not valid YAML",)),
        ("", ("expected a recipe", "an empty file")),
        ("#" * 10_000_000, ("larger than 1,000,000 bytes",)),
        ("\0", ("the character '\\x00' is not allowed",)),
        (BOMB, ("more than 20,000 values once its aliases (*name) are expanded",)),
        ("[" * 100_000, ("nested more than 40 levels",)),
    ],
)  # fmt: skip
def test_recipes_that_are_none(home, recipe, words):
    started = time.process_time()
    refused(home, recipe, *words)
    assert time.process_time() - started < 3


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
  - prune: {keep: 2, importnce: taylor}
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
  generation: {beams: 0}
baseline: smal
gates:
  accuracy: {max_drop: -1, at: nobody}
  mse: {min: 3}
  speedup: {max: 3}
  size_bytes: {}
seed: 1.5
device: cud
threads: many
"""


# By the line that each stands in: a part of the message.
ITS_MISTAKES = [
    (1, "modle: unknown key"),
    (2, "no tokenizer; expected tokenizer.json or vocab.txt"),
    (5, "train.csv:3: the label 'seven' is not one of the model's 2 labels"),
    (6, "validation.jsonl:2: column 'text' must be text, read 7"),
    (6, "validation.jsonl:3: broken JSON"),
    (7, "no such file (data for 'test'). Did you mean 'data.jsonl'?"),
    (8, "data.split.test: expected a number between 0 and 1"),
    (9, "data.windows: is for language-modeling"),
    (11, "stages[0].prune.keep: expected a number between 0 and 1 (0 excluded), read 2."),
    (11, "stages[0].prune.importnce: unknown"),
    (12, "stages[1].distill.student.decoder_layers: a bert model has no such stack"),
    (12, "stages[1].distill.epochs: expected a number above 0, read 'half'."),
    (12, "stages[1].distill.teacher: no earlier step 'nobody'."),
    (14, "stages[2].onnx.target: expected one of"),
    (15, "stages[2].from: no step 'smal'."),
    (16, "stages[3].prnue: unknown stage 'prnue'."),
    (17, "stages[4].quantize.scheme: expected one of"),
    (19, "stages[5].factorize: factorize cannot work after 'quantize', which left quantized codes"),
    (20, "stages[6].tensorrt: tensorrt works on onnx models, but its parent step 'factorize' gives torch"),
    (22, "stages[7].name: 'small' is already the name of the step in line 12."),
    (24, "score.quality[1]: 'f2' is no metric."),
    (24, "score.quality[2]: 'accuracy' is named twice."),
    (25, "score.latency.threads: expected a whole number"),
    (26, "score.generation.beams: expected a whole number"),
    (27, "baseline: no step 'smal'."),
    (29, "gates.accuracy.max_drop: expected a number of at least 0, read -1."),
    (29, "gates.accuracy.at: no step 'nobody'."),
    (30, "gates.mse.min: does not fit 'mse', which takes max_drop or max."),
    (31, "gates.speedup.max: does not fit 'speedup', which takes min."),
    (32, "gates.size_bytes: no limit; give max"),
    (33, "seed: expected a whole number"),
    (34, "device: expected one of"),
    (35, "threads: expected a whole number"),
]


def test_all_mistakes_of_a_recipe_come_at_once_and_nothing_else(home):
    """One mistake of every kind. Whoever mends what is said here has a recipe that plans."""
    (home / "train.csv").write_text("text;label\na;0\nb;seven\n")
    (home / "validation.jsonl").write_text('{"text": "a", "label": 0}\n{"text": 7, "label": 1}\n{"text": \n')
    (home / "m" / "vocab.txt").unlink()
    (home / "m" / "tokenizer.json").unlink(missing_ok=True)
    (home / "recipe.yaml").write_text(EVERYTHING_WRONG)
    result = harness.smelt(
        "plan", home / "recipe.yaml", "--until", "nowhere", "--set", "prune.x", "--set", "nobody.keep=1"
    )  # fmt: skip
    assert result.exit_code == 2
    said = result.output.removeprefix("error: ").splitlines()
    for line, words in ITS_MISTAKES:
        start = f"{home / 'recipe.yaml'}:{line}: "
        found = [text for text in said if text.startswith(start) and words in text]
        assert found, f"line {line}: {words}"
        said.remove(found[0])
    assert [text.split(": ")[0] for text in said] == ["--set prune.x", "--set nobody.keep=1", "--until"]


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (
            "prune: {what: [ffn], keep_heads: 0.5}",
            "means nothing where what does not name heads; it is [ffn].",
        ),
        ("factorize: {include: []}", "include: expected a list of at least 1 (each a text), read []."),
        (
            "factorize: {rank: 4, ratio: 0.5}",
            "give one of energy, rank, ratio and budget, not rank and ratio.",
        ),
        ("sparsify: {pattern: '4:2'}", 'sparsify.pattern: expected "n:m" with 1 <= n < m'),
        ("sparsify: {pattern: '2:4', sparsity: 0.5}", "give one of sparsity and pattern, not both."),
        ("distill: {layer_map: last}", "layer_map means nothing without one of the losses hidden, "),
        ("distill: {relation_heads: 2}", "relation_heads means nothing without the loss relations."),
        ("distill: {losses: {hidden: 1}, layer_map: {1: 9}}", "layer_map: the teacher has the states 0 (its"),
        (
            "distill: {phases: [{losses: {logits: 1}}, {losses: {cosine: 1}}], student: {config: thin.json}}",
            "phases[1].losses.cosine: the teacher's hidden states have 32 numbers, the student's 16",
        ),
    ],
)
def test_settings_that_contradict_each_other_or_the_teacher_are_one_message(home, stage, words):
    config = json.loads((home / "m" / "config.json").read_text())
    (home / "thin.json").write_text(json.dumps(config | {"hidden_size": 16}))
    said = refused(home, RECIPE.replace("prune: {keep: 0.5}", stage), words)
    assert said.count("recipe.yaml:4: stages[0]") == 1


def test_mended_recipe_plans(home):
    """What the recipe with every mistake is when each is mended as its message says."""
    text = EVERYTHING_WRONG.split("stages:", maxsplit=1)[0].replace("modle: x\n", "")
    text = text.replace("train.csv", "data.jsonl").replace("validation.jsonl", "data.jsonl")
    text = text.replace("jsno", "jsonl").replace("  split: {test: 2}\n  windows: {length: 8}\n", "")
    text += """
stages:
  - prune: {keep: 0.5, importance: taylor}
  - distill: {student: {layers: 1}, epochs: 1, teacher: model}
    name: small
  - onnx: {target: ort-cpu}
  - quantize: {scheme: int8-dynamic}
    from: small
  - onnx: {}
score: {quality: [accuracy, f1], latency: {threads: 1}}
baseline: small
gates: {accuracy: {max_drop: 1, at: small}, speedup: {min: 3}, size_bytes: {max: 10}}
"""
    (home / "recipe.yaml").write_text(text)
    assert harness.smelt("plan", home / "recipe.yaml").exit_code == 0


def test_broken_parts_do_not_hide_each_other(home):
    (home / "data.jsonl").write_text('{"text": "a", "label": 0}\n{"text": \n')
    (home / "m" / "model.safetensors").unlink()
    refused(
        home,
        RECIPE.replace("prune", "prnue").replace("test: data", "test: date") + "seed: -1\n",
        "no weights in this folder", "data.jsonl:2: broken JSON", "Did you mean 'data.jsonl'",
        "unknown stage 'prnue'", "seed: expected",
    )  # fmt: skip
    # without a task the rows cannot be read, but their files can be looked for
    refused(
        home, RECIPE.replace("text-cl", "txt-cl").replace("test: data", "test: date"),
        "unknown task", "Did you mean 'data.jsonl'",
    )  # fmt: skip
