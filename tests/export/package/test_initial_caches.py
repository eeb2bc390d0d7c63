"""First caches whose shape a tool guessed: they do not change what a graph says."""

import json
import shutil

import numpy as np
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from smelt.core.artifact import read_artifact
from smelt.core.errors import InputError
from smelt.export.graph_files import read_graph
from smelt.export.package.genai import GenaiFormat
from smelt.export.package.hub_files import accept_any_empty_cache
from smelt.export.package.optimum import OptimumFormat, optimum_graphs
from smelt.export.package.transformers_js import TransformersJsFormat
from tests.support.expected_errors import raises_code
from tests.support.graphs import exported_artifacts, translator_graphs


def layout(kind):
    folder = exported_artifacts.exported_artifact(kind)
    parts = [read_graph(folder / f"{name}.onnx") for name in ("encoder_model", "decoder_with_past_model")]
    return parts, optimum_graphs(*parts), json.loads((folder / "config.json").read_text())


def test_t5_initial_cache_uses_d_kv():
    parts, optimum_graphs, config = layout("t5")  # 32 wide, 4 heads of 6
    assert accept_any_empty_cache(optimum_graphs.merged_decoder, config) == 2
    expected = translator_graphs.run_smelt_graphs(*parts)
    for heads, width in ((4, 8), (4, 6), (3, 5)):
        outputs = translator_graphs.run_merged_graph(
            optimum_graphs.encoder, optimum_graphs.merged_decoder, heads, width
        )
        for expected_logits, logits in zip(expected, outputs, strict=True):
            np.testing.assert_allclose(logits[:, 0], expected_logits, rtol=0, atol=1e-5)


def test_unpatched_graph_rejects_initial_caches():
    _, optimum_graphs, _ = layout("t5")
    with pytest.raises(InvalidArgument, check=lambda error: "Got: 8 Expected: 6" in str(error)):
        translator_graphs.run_merged_graph(optimum_graphs.encoder, optimum_graphs.merged_decoder, 4, 8)


def test_standard_cache_shapes_are_unchanged():
    _, optimum_graphs, config = layout("translator")
    graph_bytes = optimum_graphs.merged_decoder.SerializeToString()
    assert accept_any_empty_cache(optimum_graphs.merged_decoder, config) == 0
    assert optimum_graphs.merged_decoder.SerializeToString() == graph_bytes


def test_grouped_query_decoder_accepts_caches_of_all_heads():
    folder = exported_artifacts.exported_artifact("writer")  # Llama: 4 heads, 2 of keys
    config = json.loads((folder / "config.json").read_text())
    model = read_graph(folder / "model.onnx")
    ids = np.array([[5, 9, 7]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(3)[None]}
    pasts = [i.name for i in model.graph.input if i.name.startswith("past_")]

    def logits(heads):
        session = translator_graphs.open_session(model)
        outputs = session.run(["logits"], feeds | {n: np.zeros((1, heads, 0, 16), np.float32) for n in pasts})
        return outputs[0]

    expected = logits(2)
    assert accept_any_empty_cache(model, config) == len(pasts) == 4
    np.testing.assert_array_equal(logits(2), expected)
    np.testing.assert_array_equal(logits(4), expected)


@pytest.mark.parametrize("form", [OptimumFormat(), TransformersJsFormat()])
@pytest.mark.parametrize(
    ("kind", "layers"), [("writer", "num_hidden_layers"), ("translator", "decoder_layers")]
)
def test_caches_not_matching_config_are_rejected(form, kind, layers, tmp_path):
    """As of a model whose last layer attends no more: its tool would make a cache for it."""
    folder = shutil.copytree(exported_artifacts.exported_artifact(kind), tmp_path / "model")
    form.check(read_artifact(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {layers: config[layers] + 1}))
    with raises_code("unsupported-structure", InputError) as excinfo:
        form.check(read_artifact(folder))
    assert f"{config[layers]} of {config[layers] + 1} " in str(excinfo.value)


@pytest.mark.parametrize(("form", "tool"), [
    (OptimumFormat(), "Optimum"), (TransformersJsFormat(), "transformers.js"),
    (GenaiFormat(), "onnxruntime-genai"),
])  # fmt: skip
def test_int8_caches_are_rejected_for_float_cache_tools(form, tool):
    form.check(read_artifact(exported_artifacts.exported_artifact("writer")))
    with raises_code("unsupported-kv-cache", InputError) as excinfo:
        form.check(read_artifact(exported_artifacts.exported_artifact("int8-caches")))
    assert tool in str(excinfo.value)
