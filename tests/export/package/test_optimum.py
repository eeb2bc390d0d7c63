"""The form `optimum`: its files, and (slow) what Optimum computes with them, compared with smelt."""

import shutil

import numpy as np
import onnx
import pytest

import smelt
from smelt.core.artifact import read_artifact
from smelt.export.package.hub_files import generate_arguments
from smelt.export.package.optimum import OptimumFormat
from smelt.export.package.package_format import PackageOrigin
from smelt.export.package.transformers_js import TransformersJsFormat
from smelt.export.package.write_package import write_package
from tests.support.graphs import exported_artifacts, translator_graphs
from tests.support.models import tiny
from tests.support.processes import peer_tools
from tests.support.shared_folders import make_once

KINDS = ("translator", "t5", "writer", "gpt2", "classifier", "embedder")
TEXTS = [*tiny.SENTENCES[:5], "A.", "dogs"]
GENERATION = {"max_new_tokens": 9}


def package(kind):
    def make(folder):
        origin = PackageOrigin(generation={"num_beams": 3, "max_new_tokens": 9})
        write_package(
            OptimumFormat(), read_artifact(exported_artifacts.exported_artifact(kind)), origin, folder
        )

    return make_once(f"optimum-{kind}", make)


def test_a_translator_has_both_layouts_on_one_file_of_weights():
    folder = package("translator")
    graphs = ("encoder_model", "decoder_model", "decoder_with_past_model", "decoder_model_merged")
    assert {p.stem for p in folder.glob("*.onnx")} == set(graphs)
    assert [p.name for p in folder.glob("*_data")] == ["encoder_model.onnx_data"]
    assert not (folder / "manifest.json").exists()
    source = exported_artifacts.exported_artifact("translator") / "model.onnx_data"
    assert (folder / "encoder_model.onnx_data").stat().st_size <= 1.05 * source.stat().st_size
    one, first, following, both = (str(folder / f"{name}.onnx") for name in graphs)
    artifact = [str(source.with_name(f"{n}.onnx")) for n in ("encoder_model", "decoder_with_past_model")]
    expected = translator_graphs.run_smelt_graphs(*artifact)
    for found in (
        translator_graphs.run_optimum_graphs(one, first, following),
        translator_graphs.run_merged_graph(one, both),
    ):
        for wanted, logits in zip(expected, found, strict=True):
            np.testing.assert_allclose(logits[:, 0], wanted, rtol=0, atol=1e-5)


def test_the_other_models_have_one_graph(tmp_path):
    for kind, outputs in (
        ("classifier", ["logits"]),
        ("embedder", ["sentence_embedding", "last_hidden_state"]),
    ):
        graph = onnx.load(package(kind) / "model.onnx").graph
        assert [o.name for o in graph.output] == outputs
    assert [p.name for p in package("writer").glob("*.onnx")] == ["model.onnx"]
    assert (package("embedder") / "1_Pooling" / "config.json").is_file()


@pytest.mark.parametrize("form", [OptimumFormat(), TransformersJsFormat()], ids=lambda form: form.name)
def test_a_classifier_made_from_a_sentence_embedder_is_a_classifier(form, tmp_path):
    source = tmp_path / "artifact"
    shutil.copytree(exported_artifacts.exported_artifact("classifier"), source)
    artifact = read_artifact(source)
    shutil.copyfile(
        exported_artifacts.exported_artifact("embedder") / "modules.json", source / "modules.json"
    )
    write_package(form, artifact, PackageOrigin(), tmp_path / "package")
    assert not (tmp_path / "package" / "modules.json").exists()
    assert "ForSequenceClassification" in (tmp_path / "package" / "README.md").read_text()
    (path,) = (tmp_path / "package").rglob("*.onnx")
    assert [o.name for o in onnx.load(path).graph.output] == ["logits"]


def test_the_readme_shows_how_it_was_scored():
    readme = (package("translator") / "README.md").read_text()
    assert readme.count("model.generate(**inputs, num_beams=3, max_new_tokens=9)") == 2  # in the line too
    assert "optimum-onnx[onnxruntime]==0.1.0" in readme
    assert generate_arguments(PackageOrigin()) == ""


@pytest.mark.peers
def test_optimum_says_what_smelt_says():
    asked, expected = [], []
    for kind in KINDS:
        form = {"classifier": "classifier", "embedder": "sentence"}.get(kind)
        form = form or ("seq2seq" if kind in ("translator", "t5") else "causal")
        common = {"folder": str(package(kind)), "kind": form, "texts": TEXTS}
        with smelt.load(exported_artifacts.exported_artifact(kind)) as model:
            if form in ("seq2seq", "causal"):
                for beams in (1, 4):
                    found = model.generate(TEXTS, num_beams=beams, **GENERATION)
                    for merged in (True, False) if form == "seq2seq" else (None,):
                        generation = GENERATION | {"num_beams": beams}
                        asked.append(common | {"merged": merged, "generation": generation})
                        expected.append(found)
            else:
                asked.append(common)
                rows = model.predict(TEXTS) if form == "classifier" else model.embed(TEXTS)
                expected.append(
                    [list(r.probabilities.values()) for r in rows] if form == "classifier" else rows
                )
    answers = peer_tools.run_in_optimum("open_by_optimum.py", {"packages": asked})
    for one, found, wanted in zip(asked, answers, expected, strict=True):
        if one["kind"] in ("seq2seq", "causal"):
            assert found == wanted, one
        elif one["kind"] == "classifier":
            np.testing.assert_allclose(found, wanted, atol=1e-5)
        else:
            hidden, mask = np.array(found[0]), np.array(found[1])[..., None]
            vectors = (hidden * mask).sum(1) / mask.sum(1)
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            np.testing.assert_allclose(vectors, wanted, atol=1e-5)
