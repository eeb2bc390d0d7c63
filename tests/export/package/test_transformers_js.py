"""The form `transformers.js`: its files, and (slow) what transformers.js says with them in Node."""

import json

import numpy as np
import onnx
import pytest

import smelt
from smelt.core.artifact import Artifact, read_artifact
from smelt.core.errors import InputError
from smelt.export.graph_files import read_graph
from smelt.export.package.package_format import PackageOrigin
from smelt.export.package.transformers_js import TransformersJsFormat, comparison_texts, transformers_js_dtype
from smelt.export.package.write_package import write_package
from smelt.models.text_rules import NO_LIMIT
from smelt.models.tokenizer import MarianTokenizer, TokenizerInfo, read_tokenizer_info, write_tokenizer_info
from tests.support.expected_errors import raises_code
from tests.support.graphs import exported_artifacts, graph_exports
from tests.support.models import tiny
from tests.support.processes import peer_tools
from tests.support.shared_folders import make_once

KINDS = {"translator": "seq2seq", "t5": "seq2seq", "writer": "causal"}
KINDS |= {"classifier": "classifier", "embedder": "sentence"}
TEXTS = [*tiny.SENTENCES[:4], "A.", "dogs"]
GENERATION = {"max_new_tokens": 9}


def package(kind):
    def make(folder):
        write_package(
            TransformersJsFormat(),
            read_artifact(exported_artifacts.exported_artifact(kind)),
            PackageOrigin(),
            folder,
        )

    return make_once(f"transformers-js-{kind}", make)


def read(path):
    return json.loads(path.read_text())


def test_translator_has_encoder_and_merged_decoder_with_embedded_weights():
    folder = package("translator")
    names = {"decoder_model_merged.onnx", "encoder_model.onnx"}
    assert {p.name for p in (folder / "onnx").iterdir()} == names
    assert read(folder / "config.json")["transformers.js_config"] == {"dtype": "fp32"}
    graph = onnx.load(folder / "onnx" / "decoder_model_merged.onnx", load_external_data=False).graph
    assert not any(tensor.external_data for tensor in graph.initializer)
    caches = [i for i in graph.input if i.name.startswith("past_")]
    shapes = [[d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim] for i in caches]
    assert shapes[0] == ["batch_size", 4, "past_length", 8]  # what transformers.js makes first caches by
    content = read(folder / "tokenizer_config.json")
    assert (content["tokenizer_class"], content["eos_token"]) == ("PreTrainedTokenizerFast", "</s>")


def test_pair_classifier_has_token_types():
    content = read(package("classifier") / "tokenizer_config.json")
    assert content["tokenizer_class"] == "BertTokenizer"


def test_file_suffix_names_weight_dtype():
    dtypes = {}
    for scheme in ("fp32", "int8", "groupwise", "int4", "static", "nf4"):
        graph = read_graph(
            graph_exports.exported_graphs("marian", scheme).folder / "encoder_model.onnx", values=False
        )
        dtypes[scheme] = transformers_js_dtype([graph])
    assert dtypes == {
        "fp32": "fp32", "int8": "q8", "groupwise": "q8", "int4": "q4", "static": "q8", "nf4": "bnb4",
    }  # fmt: skip


def test_beam_search_is_not_used_in_example(tmp_path):
    source = exported_artifacts.exported_artifact("translator")
    artifact = read_artifact(source)
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in source.resolve().iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    content = read(folder / "generation_config.json") | {"num_beams": 4}
    (folder / "generation_config.json").write_text(json.dumps(content))
    (tmp_path / "out").mkdir()
    TransformersJsFormat().write(Artifact(folder, artifact.manifest), PackageOrigin(), tmp_path / "out")
    del content["num_beams"]
    assert read(tmp_path / "out" / "generation_config.json") == content


def test_python_only_tokenizer_is_rejected(tmp_path):
    write_tokenizer_info(tmp_path, TokenizerInfo(reader="transformers", reason="XTokenizer runs in Python"))
    artifact = Artifact(tmp_path, read_artifact(exported_artifacts.exported_artifact("translator")).manifest)
    with raises_code("unsupported-tokenizer", InputError) as excinfo:
        TransformersJsFormat().check(artifact)
    assert "XTokenizer" in str(excinfo.value)


@pytest.mark.peers
def test_transformers_js_outputs_equal_smelt():
    requests, expected = [], []
    for kind, form in KINDS.items():
        generation = GENERATION if form in ("seq2seq", "causal") else None
        requests.append(
            {"folder": str(package(kind)), "kind": form, "texts": TEXTS, "generation": generation}
        )
        with smelt.load(exported_artifacts.exported_artifact(kind)) as model:
            if generation:
                expected.append(model.generate(TEXTS, **GENERATION))
            elif form == "classifier":
                expected.append([list(row.probabilities.values()) for row in model.predict(TEXTS)])
            else:
                expected.append([model.embed(TEXTS)] * 2)  # the finished vector, and pooled by the pipeline
    source = exported_artifacts.exported_artifact("translator")
    details = read_tokenizer_info(source)
    texts = comparison_texts(source, details, 2000)
    encode = {"folder": str(package("translator")), "texts": texts}
    answers = peer_tools.run_in_node(
        "open_by_transformers_js.mjs", {"packages": requests, "encode": [encode]}
    )
    for request, answer, expected_answer in zip(requests, answers["packages"], expected, strict=True):
        if request["generation"]:
            assert answer == expected_answer, request["folder"]
        else:
            np.testing.assert_allclose(answer, expected_answer, atol=1e-5)
    marian_ids = MarianTokenizer(source, details).encode_batch(texts, NO_LIMIT).ids
    differ = [t for t, a, b in zip(texts, marian_ids, answers["encode"][0], strict=True) if a != b]
    # its own NFKC is another for rare characters; words and punctuation are read as by the model
    assert len(differ) < 0.02 * len(texts), differ[:5]
    assert not [text for text in differ if text.isascii() and text.isprintable()]
