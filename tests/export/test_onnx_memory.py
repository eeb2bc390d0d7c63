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


def test_an_export_that_cannot_fit_is_refused(tmp_path, monkeypatch):
    source = tiny.as_artifact(tiny.write_bert(tmp_path / "m"), "text-classification")
    monkeypatch.setattr(system, "available_bytes", lambda: 1000)
    with raises_code("out-of-memory", RunError):
        Onnx()(source, OnnxSettings(), harness.make_context(tmp_path / "out", "text-classification"))
    assert not list((tmp_path / "out").iterdir())


def test_what_it_needs_is_the_weights_once_for_each_graph_at_a_time(tmp_path, monkeypatch):
    source = tiny.as_artifact(tiny.write_bert(tmp_path / "m"), "text-classification")
    asked = []

    def refuse(needed, what, remedy):
        if needed:  # nothing is widened
            asked.append(needed)
            raise RunError(what)

    monkeypatch.setattr(onnx_stage, "require_memory", refuse)
    context = harness.make_context(tmp_path / "out", "text-classification")
    for settings in (OnnxSettings(simplify=False), OnnxSettings()):
        with pytest.raises(RunError):
            Onnx()(source, settings, context)
    file = (tmp_path / "m" / "model.safetensors").stat().st_size
    assert asked[1] == 2 * asked[0]
    assert asked[0] == pytest.approx(file, rel=0.15)  # the file has a header, the model a table of positions
