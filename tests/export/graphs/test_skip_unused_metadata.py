"""Without stacks and code that nobody reads the graph is torch's own; code is there for who asks for it."""

import pytest
import torch
from torch import fx, nn
from torch.fx import _lazy_graph_module as lazy
from torch.fx import proxy
from torch.fx.experimental import proxy_tensor
from torch.fx.passes import shape_prop

from smelt.export.graphs.single_trace import skip_unused_metadata


class Rotating(nn.Module):
    """As rotary positions do it: without gradients inside, so that torch's passes take the program apart."""

    def forward(self, x):
        """x float32 [B, 3]."""
        with torch.no_grad():
            angles = x.cumsum(1)
        with torch.enable_grad():
            rotated = angles.cos() + x
        return rotated * 2


def program():
    values = (torch.ones(2, 3),)
    axes = ({0: torch.export.Dim.DYNAMIC},)
    return torch.export.export(Rotating().eval(), values, dynamic_shapes=axes, strict=False)


def exported():
    with torch.no_grad():
        return torch.onnx.export(
            Rotating().eval(), (torch.ones(2, 3),), None, dynamo=True, opset_version=20, verbose=False,
            dynamic_shapes=({0: "batch"},), output_names=["y"],
        ).model_proto  # fmt: skip


def without_stacks(model):
    for node in model.graph.node:
        props = [p for p in node.metadata_props if p.key != "pkg.torch.onnx.stack_trace"]
        del node.metadata_props[:]
        node.metadata_props.extend(props)
    return model.SerializeToString(deterministic=True)


@pytest.fixture
def metadata_counts(monkeypatch):
    """How often a stack was looked up for a node, its order in memory, and a program was written as code."""
    counts = {"stacks": 0, "orders": 0, "code": 0}

    def counted(name, real):
        def call(*args, **kwargs):
            counts[name] += 1
            return real(*args, **kwargs)

        return call

    traceback = proxy.CapturedTraceback
    monkeypatch.setattr(traceback, "extract", counted("stacks", traceback.extract))
    orders = "is_contiguous_for_memory_format_or_false"
    monkeypatch.setattr(shape_prop, orders, counted("orders", getattr(shape_prop, orders)))
    monkeypatch.setattr(fx.GraphModule, "recompile", counted("code", fx.GraphModule.recompile))
    return counts


def test_graph_equals_torch_export_with_less_metadata(metadata_counts):
    torchs, unpatched_counts = exported(), dict(metadata_counts)
    metadata_counts.update(stacks=0, orders=0, code=0)
    with skip_unused_metadata():
        trimmed_model = exported()
    assert without_stacks(trimmed_model) == without_stacks(torchs)
    assert unpatched_counts["stacks"] - metadata_counts["stacks"] >= 4  # of each operator
    assert unpatched_counts["orders"] > metadata_counts["orders"] == 0
    assert metadata_counts["code"] * 2 < unpatched_counts["code"]


def test_exported_program_runs_and_has_code():
    with skip_unused_metadata():
        program_copy = program()
    x = torch.arange(12.0).reshape(4, 3)
    torch.testing.assert_close(program_copy.module()(x), Rotating()(x))
    assert "cumsum" in program_copy.graph_module.code


def words():
    unpatched = proxy_tensor._extract_tensor_metadata is shape_prop._extract_tensor_metadata
    return fx.config.do_not_emit_stack_traces, lazy._get_graph_module_cls(), unpatched


def test_torch_is_restored_after_context():
    assert words() == (False, fx.GraphModule, True)
    with skip_unused_metadata():
        assert words() == (True, lazy._LazyGraphModule, False)
    with pytest.raises(ZeroDivisionError), skip_unused_metadata():
        raise ZeroDivisionError
    assert words() == (False, fx.GraphModule, True)


def test_unknown_torch_version_exports_without_patch(monkeypatch):
    monkeypatch.delattr(fx.config, "do_not_emit_stack_traces")
    monkeypatch.delattr(lazy, "_use_lazy_graph_module")
    monkeypatch.delattr(proxy_tensor, "_extract_tensor_metadata")
    with skip_unused_metadata():
        assert not hasattr(fx.config, "do_not_emit_stack_traces")
        assert lazy._get_graph_module_cls() is fx.GraphModule
        assert not hasattr(proxy_tensor, "_extract_tensor_metadata")
