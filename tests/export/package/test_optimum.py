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


def test_translator_has_both_layouts_with_shared_weights():
    folder = package("translator")
    graphs = ("encoder_model", "decoder_model", "decoder_with_past_model", "decoder_model_merged")
    assert {p.stem for p in folder.glob("*.onnx")} == set(graphs)
    assert [p.name for p in folder.glob("*_data")] == ["encoder_model.onnx_data"]
    assert not (folder / "manifest.json").exists()
    source = exported_artifacts.exported_artifact("translator") / "model.onnx_data"
    assert (folder / "encoder_model.onnx_data").stat().st_size <= 1.05 * source.stat().st_size
    encoder_path, first, following, merged_path = (str(folder / f"{name}.onnx") for name in graphs)
    artifact = [str(source.with_name(f"{n}.onnx")) for n in ("encoder_model", "decoder_with_past_model")]
    expected = translator_graphs.run_smelt_graphs(*artifact)
    for outputs in (
        translator_graphs.run_optimum_graphs(encoder_path, first, following),
        translator_graphs.run_merged_graph(encoder_path, merged_path),
    ):
        for expected_logits, logits in zip(expected, outputs, strict=True):
            np.testing.assert_allclose(logits[:, 0], expected_logits, rtol=0, atol=1e-5)


def test_other_models_have_one_graph(tmp_path):
    for kind, outputs in (
        ("classifier", ["logits"]),
        ("embedder", ["sentence_embedding", "last_hidden_state"]),
    ):
        graph = onnx.load(package(kind) / "model.onnx").graph
        assert [o.name for o in graph.output] == outputs
    assert [p.name for p in package("writer").glob("*.onnx")] == ["model.onnx"]
    assert (package("embedder") / "1_Pooling" / "config.json").is_file()


@pytest.mark.parametrize("form", [OptimumFormat(), TransformersJsFormat()], ids=lambda form: form.name)
def test_classifier_from_sentence_embedder_is_packaged_as_classifier(form, tmp_path):
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


def test_readme_uses_generation_settings_of_scores():
    readme = (package("translator") / "README.md").read_text()
    assert readme.count("model.generate(**inputs, num_beams=3, max_new_tokens=9)") == 2  # in the line too
    assert "optimum-onnx[onnxruntime]==0.1.0" in readme
    assert generate_arguments(PackageOrigin()) == ""


@pytest.mark.peers
def test_optimum_outputs_equal_smelt():
    requests, expected = [], []
    for kind in KINDS:
        form = {"classifier": "classifier", "embedder": "sentence"}.get(kind)
        form = form or ("seq2seq" if kind in ("translator", "t5") else "causal")
        common = {"folder": str(package(kind)), "kind": form, "texts": TEXTS}
        with smelt.load(exported_artifacts.exported_artifact(kind)) as model:
            if form in ("seq2seq", "causal"):
                for beams in (1, 4):
                    answer = model.generate(TEXTS, num_beams=beams, **GENERATION)
                    for is_merged in (True, False) if form == "seq2seq" else (None,):
                        generation = GENERATION | {"num_beams": beams}
                        requests.append(common | {"merged": is_merged, "generation": generation})
                        expected.append(answer)
            else:
                requests.append(common)
                smelt_outputs = model.predict(TEXTS) if form == "classifier" else model.embed(TEXTS)
                expected.append(
                    [list(r.probabilities.values()) for r in smelt_outputs]
                    if form == "classifier"
                    else smelt_outputs
                )
    answers = peer_tools.run_in_optimum("open_by_optimum.py", {"packages": requests})
    for request, answer, expected_answer in zip(requests, answers, expected, strict=True):
        if request["kind"] in ("seq2seq", "causal"):
            assert answer == expected_answer, request
        elif request["kind"] == "classifier":
            np.testing.assert_allclose(answer, expected_answer, atol=1e-5)
        else:
            hidden, mask = np.array(answer[0]), np.array(answer[1])[..., None]
            vectors = (hidden * mask).sum(1) / mask.sum(1)
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            np.testing.assert_allclose(vectors, expected_answer, atol=1e-5)
