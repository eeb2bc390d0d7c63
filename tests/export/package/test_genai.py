"""A package for onnxruntime-genai: its config says what the graph has, and the package runs it."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

import smelt
from smelt.core.artifact import read_artifact
from smelt.core.errors import InputError
from smelt.core.files import read_json_object
from smelt.export.package.genai import GenaiFormat
from smelt.export.package.package_format import PackageOrigin
from smelt.models.text_rules import read_prompt_template
from tests.support.expected_errors import raises_code
from tests.support.graphs import exported_artifacts
from tests.support.processes import peer_tools

PROMPTS = ["she sings", "the old house stands"]


def written(kind: str, folder: Path) -> Path:
    folder.mkdir()
    artifact = read_artifact(exported_artifacts.exported_artifact(kind))
    GenaiFormat().check(artifact)
    GenaiFormat().write(artifact, PackageOrigin(generation={"max_new_tokens": 8}), folder)
    return folder


@pytest.mark.parametrize("kind", ["gpt2", "writer"])
def test_config_names_and_sizes_equal_graph(tmp_path: Path, kind: str) -> None:
    folder = written(kind, tmp_path / "p")
    content = json.loads((folder / "genai_config.json").read_text())["model"]
    graph = onnx.load(folder / content["decoder"]["filename"], load_external_data=False).graph
    shapes = {
        graph_value.name: [dim.dim_value for dim in graph_value.type.tensor_type.shape.dim]
        for graph_value in (*graph.input, *graph.output)
    }
    layers, config_names = content["decoder"]["num_hidden_layers"], set()
    for side in ("inputs", "outputs"):
        for name in content["decoder"][side].values():
            config_names |= {name % i for i in range(layers)} if "%d" in name else {name}
    assert config_names == set(shapes) - {"num_logits_to_keep"}  # which has a default
    cache = shapes["past_key_values.0.key"]
    assert [content["decoder"]["num_key_value_heads"], content["decoder"]["head_size"]] == [
        cache[1],
        cache[3],
    ]
    assert content["vocab_size"] == shapes["logits"][2]
    assert content["context_length"] == 64
    assert not list(folder.glob("generate*"))


def test_layers_of_different_shapes_are_rejected(tmp_path: Path) -> None:
    source = read_artifact(exported_artifacts.exported_artifact("gpt2"))
    shutil.copytree(source.path, tmp_path / "a")
    model = onnx.load(tmp_path / "a" / "model.onnx", load_external_data=False)
    cache = next(
        graph_input for graph_input in model.graph.input if graph_input.name == "past_key_values.1.key"
    )
    cache.type.tensor_type.shape.dim[1].dim_value = 2
    onnx.save(model, tmp_path / "a" / "model.onnx")
    with raises_code("unsupported-structure", InputError):
        GenaiFormat().check(dataclasses.replace(source, path=tmp_path / "a"))


def test_unsupported_generation_rules_are_rejected(tmp_path: Path) -> None:
    artifact = read_artifact(exported_artifacts.exported_artifact("gpt2"))
    with raises_code("unsupported-generation-setting", InputError):
        GenaiFormat().write(artifact, PackageOrigin(generation={"no_repeat_ngram_size": 2}), tmp_path)


# stands for onnxruntime-genai: prints the texts that it tokenizes, and generates nothing
FAKE_GENAI = """
class Model:
    def __init__(self, folder): pass
class Tokenizer:
    def __init__(self, model): pass
    def encode(self, text): print(repr(text)); return [5]
    def decode(self, ids): return f"response of {len(ids)} tokens"
class GeneratorParams:
    def __init__(self, model): pass
    def set_search_options(self, **options): pass
class Generator:
    def __init__(self, model, params): pass
    def append_tokens(self, ids): self.ids = ids
    def is_done(self): return True
    def get_sequence(self, at): return [*self.ids, 6, 7]
"""
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("template", ["chat", "Q: {prompt}\nA:"])
def test_example_program_renders_prompts_like_the_model(tmp_path: Path, template: str) -> None:
    source = read_artifact(exported_artifacts.exported_artifact("gpt2"))
    shutil.copytree(source.path, tmp_path / "a")
    rules = read_json_object(tmp_path / "a" / "text.json") | {"prompt_template": template}
    (tmp_path / "a" / "text.json").write_text(json.dumps(rules))
    (tmp_path / "a" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    expected = read_prompt_template(tmp_path / "a")
    assert expected is not None
    folder = tmp_path / "p"
    folder.mkdir()
    usage = GenaiFormat().write(dataclasses.replace(source, path=tmp_path / "a"), PackageOrigin(), folder)
    assert ("jinja2" in usage.install) == (template == "chat")
    (folder / "onnxruntime_genai.py").write_text(FAKE_GENAI)
    prompts = ["Who wrote Faust?", "{prompt} 'it'"]
    command = [sys.executable, "answer.py", *prompts]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for prompt in prompts for line in (repr(expected.render(prompt)), "response of 2 tokens")]
    assert done.stdout.splitlines() == lines


@pytest.mark.peers
@pytest.mark.parametrize("kind", ["gpt2", "writer"])
def test_onnxruntime_genai_equals_smelt_generation(tmp_path: Path, kind: str) -> None:
    """Tokens, since a model with random weights breaks letters."""
    environment = peer_tools.genai_environment()
    folder = written(kind, tmp_path / "p")
    program = (folder / "answer.py").read_text().replace("print(text + tokenizer.decode(new))", "print(*new)")
    (folder / "tokens.py").write_text(program)
    command = [sys.executable, "tokens.py", *PROMPTS]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with smelt.load(exported_artifacts.exported_artifact(kind)) as model:
        tokenizer = model._runner.text.tokenizer
        expected = model.generate(PROMPTS, max_new_tokens=8, batch_size=1)
    answers = [
        text + tokenizer.decode_batch([[int(token) for token in line.split()]])[0]
        for text, line in zip(PROMPTS, done.stdout.splitlines(), strict=True)
    ]
    assert answers == expected
