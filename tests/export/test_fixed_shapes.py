"""Exports without dynamic axes: the graph's shapes, and the same results as the model for any batch."""

import importlib.util
import json
import sys

import numpy as np
import onnx
import pytest

import smelt
from smelt.api.package import package_artifact
from smelt.core.errors import InputError
from smelt.export.onnx_stage import Onnx, require_room_for_text
from smelt.export.settings import OnnxSettings
from smelt.export.tensorrt.stage import TensorrtSettings, TensorrtStage
from smelt.runtimes.registry import open_folder
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.graphs.fixed_artifacts import KINDS, LENGTH, run_folder
from tests.support.models import images, tiny

LONG = " ".join(tiny.SENTENCES * 3)
TEXTS = [*tiny.SENTENCES[:4], "a", LONG]


def step_scores(run):
    report = json.loads((run / "report.json").read_text())
    return {step["name"]: step for step in report["steps"]}


@pytest.mark.parametrize("kind", KINDS)
def test_graph_without_dynamic_sizes_scores_as_its_model(kind):
    run = run_folder(kind)
    graph = onnx.load(run / "artifacts" / "onnx" / "model.onnx").graph
    values = [*graph.input, *graph.output, *graph.value_info]
    assert not [v.name for v in values if any(d.dim_param for d in v.type.tensor_type.shape.dim)]
    is_image = KINDS[kind][2] == images.TASK
    size = [3, 3, images.IMAGE_SIZE, images.IMAGE_SIZE] if is_image else [2, LENGTH]
    assert {tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in graph.input} == {tuple(size)}
    assert "Shape" not in {node.op_type for node in graph.node}  # the simplification has used the sizes
    steps = step_scores(run)
    assert steps["onnx"]["details"]["parity"]["model"]["largest"] < 1e-4
    assert bool(steps["onnx"]["latency"]) == (kind == "classifier")
    if is_image or kind in ("classifier", "masked"):  # no text is longer than the graph
        metric = KINDS[kind][3]
        assert steps["onnx"]["quality"][metric]["value"] == steps["model"]["quality"][metric]["value"]


def test_batches_of_any_size_equal_the_model_and_longer_texts_are_truncated():
    artifacts = run_folder("classifier") / "artifacts"
    with smelt.load(artifacts / "model") as model, smelt.load(artifacts / "onnx") as graph:
        expected = model.predict(TEXTS[:-1])
        for batch_size in (1, 2, 5):
            predicted = graph.predict(TEXTS[:-1], batch_size=batch_size)
            assert [p.label for p in predicted] == [p.label for p in expected]
            for one, other in zip(predicted, expected, strict=True):
                assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)
        with pytest.warns(smelt.TruncationWarning):
            graph.predict(TEXTS)


def test_longer_rows_that_were_not_truncated_are_refused():
    artifact = run_folder("classifier") / "artifacts" / "onnx"
    ids = np.ones((1, LENGTH + 1), dtype=np.int64)
    with open_folder(artifact, "onnx", "ort-cpu", 1) as runner, raises_code("longer-than-graph", InputError):
        runner.backend.call("model", {"input_ids": ids, "attention_mask": ids})


@pytest.mark.parametrize("kind", ["classifier", "embedder", "tagger", "masked"])
def test_standalone_package_pads_and_splits_as_smelt(kind, tmp_path, monkeypatch):
    artifact = run_folder(kind) / "artifacts" / "onnx"
    texts = [f"[MASK] {text}" for text in TEXTS] if kind == "masked" else TEXTS
    package_artifact(artifact, out=tmp_path / "package")
    spec = importlib.util.spec_from_file_location("infer", tmp_path / "package" / "infer.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "infer", module)
    spec.loader.exec_module(module)
    names = {"classifier": "Classifier", "embedder": "Embedder", "tagger": "Tagger", "masked": "MaskFiller"}
    packaged = getattr(module, names[kind])(tmp_path / "package")
    answers = packaged(texts, batch_size=5)
    cut = packaged.cut if hasattr(packaged, "cut") else packaged.tokenizer.cut
    assert cut >= 1  # the longest
    with smelt.load(artifact) as model:
        call = {"tagger": "tag", "masked": "fill_mask", "embedder": "embed"}.get(kind, "predict")
        with pytest.warns(smelt.TruncationWarning):
            expected = getattr(model, call)(texts)
    if kind == "classifier":
        assert [label for label, _ in answers] == [prediction.label for prediction in expected]
    elif kind == "embedder":
        np.testing.assert_allclose(answers, expected, atol=1e-6)
    else:
        assert len(answers) == len(expected)
        np.testing.assert_allclose(_probabilities(answers), _probabilities(expected), atol=1e-5)


def _probabilities(answers):
    """Return the numbers called `score` in nested answers of a package or of smelt, in their order."""
    if isinstance(answers, dict):
        return [answers["score"]]
    if hasattr(answers, "score"):
        return [answers.score]
    parts = getattr(answers, "tokens", answers)
    return [value for part in parts for value in _probabilities(part)]


def test_other_package_formats_refuse_fixed_shapes(tmp_path):
    artifact = run_folder("classifier") / "artifacts" / "onnx"
    for name in ("optimum", "transformers.js", "one-file", "triton"):
        with raises_code("fixed-shapes", InputError):
            package_artifact(artifact, format=name, out=tmp_path / name)


def test_tensorrt_stage_refuses_fixed_shapes(tmp_path):
    artifact = tiny.as_artifact(tmp_path, "text-classification", target="tensorrt", batch_size=1)
    with raises_code("fixed-shapes", InputError):
        TensorrtStage()(artifact, TensorrtSettings(), harness.make_context(tmp_path / "out"))


@pytest.mark.parametrize(
    ("settings", "inputs"),
    [
        ({"batch_size": 1}, [1, "length"]),
        ({"sequence_length": 8}, ["batch", 8]),
        ({"batch_size": 3, "sequence_length": 8, "target": "tensorrt", "dtype": "fp16"}, [3, 8]),
        ({"batch_size": 2, "sequence_length": 8, "target": "openvino"}, [2, 8]),
    ],
)
def test_each_size_is_fixed_on_its_own_and_for_each_target(settings, inputs, tmp_path):
    if settings.get("target") == "openvino":
        pytest.importorskip("openvino")
    source, rows = tiny.write_bert(tmp_path / "m", num_hidden_layers=1), tmp_path / "rows.jsonl"
    ctx = harness.run_stage(
        Onnx(), OnnxSettings(**settings), source, tmp_path / "out", "text-classification",
        read_rows(tiny.write_labeled(rows), tmp_path),
    )  # fmt: skip
    graph = onnx.load(ctx.out / "model.onnx").graph
    shapes = [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.input]
    assert shapes == [inputs] * len(shapes)
    assert ctx.details["parity"]["model"]["agreement"] == 1


def read_rows(path, folder):
    from smelt.data.splits import Columns
    from smelt.tasks.read_split import read_split

    return read_split(str(path), "text-classification", Columns(), folder)


def test_int8_graph_equals_its_model_on_the_same_padding(tmp_path):
    """int8-dynamic computes ranges over a call's rows, padding included, so the parent is padded too."""
    from smelt.compress.quantize.stage import Quantize, QuantizeSettings

    source = tiny.write_bert(tmp_path / "m", num_hidden_layers=1)
    data = read_rows(tiny.write_labeled(tmp_path / "rows.jsonl"), tmp_path)
    task = "text-classification"
    quantized = harness.run_stage(
        Quantize(), QuantizeSettings(scheme="int8-dynamic"), source, tmp_path / "q", task, data
    )
    settings = OnnxSettings(batch_size=3, sequence_length=LENGTH)
    ctx = harness.run_stage(Onnx(), settings, quantized.out, tmp_path / "o", task, data)
    assert ctx.details["parity"]["model"]["mean"] < 1e-3  # without padding in both: 0.01
    assert ctx.details["depends_on_batch"] is True
    one_sample = OnnxSettings(batch_size=1, sequence_length=LENGTH)
    ctx = harness.run_stage(Onnx(), one_sample, quantized.out, tmp_path / "one", task, data)
    assert ctx.details["depends_on_batch"] is False


@pytest.mark.quick
@pytest.mark.parametrize(
    ("task", "settings", "refused"),
    [
        ("translation", {"batch_size": 1}, ["batch_size"]),
        ("language-modeling", {"batch_size": 1, "sequence_length": 8}, ["batch_size", "sequence_length"]),
        ("image-classification", {"batch_size": 1, "sequence_length": 8}, ["sequence_length"]),
        ("text-classification", {"batch_size": 1, "sequence_length": 8}, []),
    ],
)
def test_tasks_with_caches_have_no_fixed_shapes(task, settings, refused):
    errors = Onnx.check_rows(OnnxSettings(**settings), task, {})
    assert [error.setting for error in errors] == refused
    assert {error.code for error in errors} <= {"unsupported-task"}


@pytest.mark.quick
def test_length_beyond_the_positions_of_the_model_is_refused():
    config = {"model_type": "bert", "max_position_embeddings": 64}
    errors, _ = Onnx.check_model(OnnxSettings(sequence_length=65), config)
    assert [(error.code, error.setting) for error in errors] == [("does-not-fit-model", "sequence_length")]
    assert Onnx.check_model(OnnxSettings(sequence_length=64), config)[0] == []


def test_length_without_room_for_text_is_refused(tmp_path):
    source = tiny.write_bert(tmp_path / "m", num_hidden_layers=1)  # [CLS] and [SEP]
    with raises_code("does-not-fit-model", InputError) as error:
        harness.run_stage(
            Onnx(), OnnxSettings(sequence_length=2), source, tmp_path / "out", "text-classification"
        )
    assert error.value.setting == "sequence_length"
    require_room_for_text(3, source)
    with raises_setting_codes("greater_than_equal"):
        OnnxSettings(sequence_length=1)


@pytest.mark.quick
@pytest.mark.parametrize("more", [{"target": "ort-tensorrt"}, {"autotune": True}])
def test_settings_that_need_several_sizes_are_refused(more):
    with raises_setting_codes("settings-conflict"):
        OnnxSettings(batch_size=1, **more)
