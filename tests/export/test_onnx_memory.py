"""An export whose copies of the weights cannot fit is refused before it begins."""

import pytest

from smelt.core import system
from smelt.core.errors import RunError
from smelt.export import onnx_stage
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import tiny


def test_export_exceeding_memory_is_rejected(tmp_path, monkeypatch):
    source = tiny.as_artifact(tiny.write_bert(tmp_path / "m"), "text-classification")
    monkeypatch.setattr(system, "available_bytes", lambda: 1000)
    with raises_code("out-of-memory", RunError):
        Onnx()(source, OnnxSettings(), harness.make_context(tmp_path / "out", "text-classification"))
    assert not list((tmp_path / "out").iterdir())


def test_memory_estimate_is_weights_per_graph(tmp_path, monkeypatch):
    source = tiny.as_artifact(tiny.write_bert(tmp_path / "m"), "text-classification")
    requested_bytes = []

    def refuse(needed, what, remedy):
        if needed:  # nothing is widened
            requested_bytes.append(needed)
            raise RunError(what)

    monkeypatch.setattr(onnx_stage, "require_memory", refuse)
    context = harness.make_context(tmp_path / "out", "text-classification")
    for settings in (OnnxSettings(simplify=False), OnnxSettings()):
        with pytest.raises(RunError):
            Onnx()(source, settings, context)
    file = (tmp_path / "m" / "model.safetensors").stat().st_size
    assert requested_bytes[1] == 2 * requested_bytes[0]
    assert requested_bytes[0] == pytest.approx(
        file, rel=0.15
    )  # the file has a header, the model a table of positions
