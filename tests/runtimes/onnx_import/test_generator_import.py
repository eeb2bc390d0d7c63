"""Graphs in Optimum's layout become those that smelt's runners call, and compute the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from smelt.core.artifact import read_artifact
from smelt.core.errors import InputError
from smelt.export.package.optimum import OptimumFormat
from smelt.export.package.package_format import PackageOrigin
from smelt.export.package.write_package import write_package
from smelt.generation.config import GenerationSettings
from smelt.runtimes.onnx_import import import_graph as generator_import
from smelt.runtimes.onnx_import.convert_optimum import required_graphs
from smelt.runtimes.onnx_import.import_graph import import_generator, subprocess_main
from smelt.runtimes.predict_texts import generate_texts
from smelt.runtimes.registry import open_folder
from tests.support import shared_folders
from tests.support.expected_errors import raises_code
from tests.support.graphs import exported_artifacts
from tests.support.models import tiny

TEXTS = [*tiny.SENTENCES[:4], "dogs"]


@pytest.fixture(autouse=True)
def asked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask in this process: that a new one is limited, test_isolated_process.py asks."""
    monkeypatch.setattr(
        "smelt.runtimes.onnx_import.import_graph.run_isolated",
        lambda _, arguments, __: subprocess_main(arguments),
    )


def package(kind: str, folder: Path) -> Path:
    """Return a copy of the package for Optimum of an artifact."""

    def make(home: Path) -> None:
        write_package(
            OptimumFormat(),
            read_artifact(exported_artifacts.exported_artifact(kind)),
            PackageOrigin(generation={}),
            home,
        )

    shutil.copytree(shared_folders.make_once(f"taken-{kind}", make), folder)
    return folder


def taken(source: Path, out: Path, without: tuple[str, ...] = ()) -> Path:
    """Take the graphs in `source` but some; return a folder that a runner opens."""
    graph_paths = {path.stem: path for path in source.glob("*.onnx") if path.stem not in without}
    parts = required_graphs(graph_paths)
    assert not isinstance(parts, str), parts
    out.mkdir()
    config = json.loads((source / "config.json").read_text())
    import_generator({name: graph_paths[name] for name in parts[1]}, config, out)
    return out


def answers(folder: Path, words: Path, beams: int = 1) -> list[str]:
    """Generate with the graphs in `folder`, step by step; config and tokenizer are those of `words`."""
    for file in words.iterdir():
        if file.is_file() and not file.name.startswith(("generate", "encoder", "decoder", "model")):
            shutil.copyfile(file, folder / file.name)
    with open_folder(folder, "onnx", "ort-cpu", 1) as runner:
        assert not runner.backend.generation_graphs
        return generate_texts(runner, TEXTS, GenerationSettings(num_beams=beams, max_new_tokens=6), 3)


def expected(kind: str, beams: int = 1) -> list[str]:
    with open_folder(exported_artifacts.exported_artifact(kind), "onnx", "ort-cpu", 1) as runner:
        return generate_texts(runner, TEXTS, GenerationSettings(num_beams=beams, max_new_tokens=6), 3)


@pytest.mark.parametrize("without", [(), ("decoder_model", "decoder_with_past_model")])
def test_translator_of_both_layouts_generates_the_same_texts(
    without: tuple[str, ...], tmp_path: Path
) -> None:
    folder = taken(package("translator", tmp_path / "p"), tmp_path / "out", without)
    assert {p.name for p in folder.glob("*.onnx")} == {"encoder_model.onnx", "decoder_with_past_model.onnx"}
    for beams in (1, 3):
        assert answers(folder, exported_artifacts.exported_artifact("translator"), beams) == expected(
            "translator", beams
        )


def test_language_model_generates_the_same_texts(tmp_path: Path) -> None:
    folder = taken(package("gpt2", tmp_path / "p"), tmp_path / "out")
    assert answers(folder, exported_artifacts.exported_artifact("gpt2")) == expected("gpt2")


def change(path: Path, factor: float) -> None:
    """Multiply the largest weight of the graph in `path`, and take its other weights along."""
    model = onnx.load(path)
    tensor = max(model.graph.initializer, key=lambda t: int(np.prod(t.dims)))
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(factor), tensor.name))
    onnx.save(model, path)


def test_decoders_of_two_models_are_not_merged(tmp_path: Path) -> None:
    source = package("translator", tmp_path / "p")
    change(source / "decoder_with_past_model.onnx", 1.5)
    with raises_code("parity-failed", InputError):
        taken(source, tmp_path / "out")


def test_language_model_ignoring_its_padding_is_refused(tmp_path: Path) -> None:
    source = package("gpt2", tmp_path / "p")
    model: Any = onnx.load(source / "model.onnx")
    ones = onnx.helper.make_node("Shape", ["attention_mask"], ["mask.shape"])
    constant = onnx.helper.make_tensor("value", onnx.TensorProto.INT64, [1], [1])
    fill = onnx.helper.make_node("ConstantOfShape", ["mask.shape"], ["mask.of_ones"], value=constant)
    for node in model.graph.node:
        node.input[:] = ["mask.of_ones" if name == "attention_mask" else name for name in node.input]
    old = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([ones, fill, *old])
    onnx.save(model, source / "model.onnx")
    with raises_code("parity-failed", InputError):
        taken(source, tmp_path / "out")


def test_graph_without_position_ids_gets_this_input(tmp_path: Path) -> None:
    """Optimum exports OPT and Bloom so; every step feeds them."""
    graph = onnx.helper.make_graph([], "g", [], [])
    converted = generator_import.convert_decoder_only(onnx.helper.make_model(graph))
    assert [value.name for value in converted.graph.input] == ["position_ids"]


def test_int8_cache_error_names_the_file(tmp_path: Path) -> None:
    source = exported_artifacts.exported_artifact("int8-caches") / "model.onnx"
    with raises_code("unsupported-cache", InputError):
        import_generator({"model": source}, {}, tmp_path)
