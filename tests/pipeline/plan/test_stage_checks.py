"""Windows beyond the model's positions, and a training without a compiler, are refused before any work."""

import json

from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.pipeline.plan.load_plan import load_plan
from tests.support.expected_errors import message_locations, raises_code

RECIPE = """\
model: {config: llama.json, tokenizer: {train: bpe, vocab_size: 600}}
task: language-modeling
data:
  train: text.txt
  test: text.txt
  windows: {length: LENGTH}
stages:
  - finetune: {max_steps: 1}
score: {latency: false}
"""


def _plan(folder, length):
    config = {"model_type": "llama", "hidden_size": 64, "max_position_embeddings": 256}
    (folder / "llama.json").write_text(json.dumps(config))
    (folder / "text.txt").write_text("A man rides.\nTwo dogs run.\n")
    (folder / "recipe.yaml").write_text(RECIPE.replace("LENGTH", str(length)))
    return load_plan(folder / "recipe.yaml")


def test_windows_longer_than_model_positions_are_rejected(tmp_path):
    with raises_code("window-too-long", InputError) as excinfo:
        _plan(tmp_path, 257)
    assert message_locations(excinfo.value.messages) == [("window-too-long", "data.windows.length", 6)]
    assert all(number in str(excinfo.value) for number in ("257", "256"))


def test_windows_as_long_as_model_positions_are_accepted(tmp_path):
    assert _plan(tmp_path, 256).recipe.data.windows.length == 256


def test_compilation_before_first_update_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/c++")
    assert "compilation-time" not in message_codes(_plan(tmp_path, 256).notes)
    monkeypatch.setattr(
        f"{__name__}.RECIPE", RECIPE.replace("max_steps: 1", "max_steps: 1, torch_compile: true")
    )
    [note] = [note for note in _plan(tmp_path, 256).notes if note.code == "compilation-time"]
    assert (note.severity, note.step) == ("info", "finetune")


def test_compiled_training_requires_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert _plan(tmp_path, 256).steps
    monkeypatch.setattr(
        f"{__name__}.RECIPE", RECIPE.replace("max_steps: 1", "max_steps: 1, torch_compile: true")
    )
    with raises_code("no-compiler", InputError) as excinfo:
        _plan(tmp_path, 256)
    assert excinfo.value.messages[0].setting == "stages[0].finetune.torch_compile"
