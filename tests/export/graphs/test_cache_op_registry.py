"""torch's table of operators is read once, whoever adds to it has a copy, and nothing stays patched."""

import logging

import onnx
import pytest
import torch
from onnx_ir.schemas import OpSignature
from torch.onnx._internal.exporter import _registration

from smelt.export.graphs import export_graph
from smelt.export.graphs.export_graph import cached_op_registry

Registry = _registration.ONNXRegistry


def table(opset=20):
    return Registry().from_torchlib(opset_version=opset)


def test_second_export_reuses_op_registry(monkeypatch):
    with cached_op_registry():
        first = table()
    with monkeypatch.context() as m, cached_op_registry():
        m.setattr(_registration.onnxscript_apis, "get_torchlib_ops", lambda: pytest.fail("it was read again"))
        second = table()
    assert second.functions == first.functions
    assert len(second.functions) > 400


def test_each_opset_has_its_own_registry():
    with cached_op_registry():
        tables = {opset: table(opset) for opset in (20, 23)}
    attention = torch.ops.aten.scaled_dot_product_attention.default.name()
    opset_versions = [
        [overload.opset_introduced for overload in t.functions[attention]] for t in tables.values()
    ]
    assert opset_versions[0] != opset_versions[1]
    assert [t.opset_version for t in tables.values()] == [20, 23]


def test_added_operator_is_not_in_next_registry():
    add = torch.ops.aten.add.Tensor
    with cached_op_registry():
        registry = table()
        num_known = len(registry.get_decomps(add))
        registry.register_op(add, lambda a, b: a)
        assert len(registry.get_decomps(add)) == num_known + 1
        assert len(table().get_decomps(add)) == num_known


def test_op_signature_is_cached_per_version():
    relu = [onnx.defs.get_schema("Relu", version) for version in (13, 14, 20)]
    uncached = [OpSignature.from_op_schema(schema) for schema in relu]
    with cached_op_registry():
        signatures = [OpSignature.from_op_schema(schema) for schema in relu]
        assert signatures == uncached
        assert signatures[0] != signatures[1]
        assert signatures[1] is signatures[2] is OpSignature.from_op_schema(relu[1])
    assert OpSignature.from_op_schema(relu[1]) is not signatures[1]


@pytest.mark.parametrize(("holder", "name"), [(Registry, "from_torchlib"), (OpSignature, "from_op_schema")])
def test_torch_is_restored_after_context(holder, name):
    reads = vars(holder)[name]
    with pytest.raises(ZeroDivisionError), cached_op_registry():
        1 / (vars(holder)[name] is reads)
    assert vars(holder)[name] is reads


def test_unknown_torch_version_exports_without_patch(monkeypatch):
    monkeypatch.delattr(Registry, "from_torchlib")
    monkeypatch.delattr(OpSignature, "from_op_schema")
    with cached_op_registry():
        assert not hasattr(OpSignature, "from_op_schema")
        assert not hasattr(Registry, "from_torchlib")


@pytest.mark.parametrize("level", [logging.NOTSET, logging.DEBUG])
def test_torch_logger_level_is_restored(level):
    logger = logging.getLogger(_registration.__name__)
    previous_level = logger.level
    logger.setLevel(level)
    try:
        with export_graph._silence_export_warnings():
            assert logger.level == logging.ERROR
        assert logger.level == level
    finally:
        logger.setLevel(previous_level)
