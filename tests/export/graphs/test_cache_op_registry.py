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


def test_the_second_export_reads_no_table(monkeypatch):
    with cached_op_registry():
        first = table()
    with monkeypatch.context() as m, cached_op_registry():
        m.setattr(_registration.onnxscript_apis, "get_torchlib_ops", lambda: pytest.fail("it was read again"))
        again = table()
    assert again.functions == first.functions
    assert len(again.functions) > 400


def test_each_opset_has_its_own_table():
    with cached_op_registry():
        tables = {opset: table(opset) for opset in (20, 23)}
    attention = torch.ops.aten.scaled_dot_product_attention.default.name()
    ways = [[way.opset_introduced for way in t.functions[attention]] for t in tables.values()]
    assert ways[0] != ways[1]
    assert [t.opset_version for t in tables.values()] == [20, 23]


def test_an_operator_that_someone_adds_is_not_in_the_next_table():
    add = torch.ops.aten.add.Tensor
    with cached_op_registry():
        mine = table()
        known = len(mine.get_decomps(add))
        mine.register_op(add, lambda a, b: a)
        assert len(mine.get_decomps(add)) == known + 1
        assert len(table().get_decomps(add)) == known


def test_an_operator_of_onnx_is_read_once_in_each_version():
    relu = [onnx.defs.get_schema("Relu", version) for version in (13, 14, 20)]
    own = [OpSignature.from_op_schema(schema) for schema in relu]
    with cached_op_registry():
        found = [OpSignature.from_op_schema(schema) for schema in relu]
        assert found == own
        assert found[0] != found[1]
        assert found[1] is found[2] is OpSignature.from_op_schema(relu[1])
    assert OpSignature.from_op_schema(relu[1]) is not found[1]


@pytest.mark.parametrize(("holder", "name"), [(Registry, "from_torchlib"), (OpSignature, "from_op_schema")])
def test_torch_is_as_it_was_afterwards(holder, name):
    reads = vars(holder)[name]
    with pytest.raises(ZeroDivisionError), cached_op_registry():
        1 / (vars(holder)[name] is reads)
    assert vars(holder)[name] is reads


def test_a_torch_that_reads_its_table_elsewhere_exports_as_it_does(monkeypatch):
    monkeypatch.delattr(Registry, "from_torchlib")
    monkeypatch.delattr(OpSignature, "from_op_schema")
    with cached_op_registry():
        assert not hasattr(OpSignature, "from_op_schema")
        assert not hasattr(Registry, "from_torchlib")


@pytest.mark.parametrize("level", [logging.NOTSET, logging.DEBUG])
def test_the_level_of_torchs_logger_is_restored(level):
    logger = logging.getLogger(_registration.__name__)
    before = logger.level
    logger.setLevel(level)
    try:
        with export_graph._silence_export_warnings():
            assert logger.level == logging.ERROR
        assert logger.level == level
    finally:
        logger.setLevel(before)
