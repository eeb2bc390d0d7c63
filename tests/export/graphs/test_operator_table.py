"""torch's table of operators is read once, whoever adds to it has a copy, and nothing stays patched."""

import pytest
import torch
from torch.onnx._internal.exporter import _registration

from smelt.export.graphs.operator_table import table_read_once

Registry = _registration.ONNXRegistry


def table(opset=20):
    return Registry().from_torchlib(opset_version=opset)


def test_the_second_export_reads_no_table(monkeypatch):
    with table_read_once():
        first = table()
    with monkeypatch.context() as m, table_read_once():
        m.setattr(_registration.onnxscript_apis, "get_torchlib_ops", lambda: pytest.fail("it was read again"))
        again = table()
    assert again.functions == first.functions
    assert len(again.functions) > 400


def test_each_opset_has_its_own_table():
    with table_read_once():
        tables = {opset: table(opset) for opset in (20, 23)}
    attention = torch.ops.aten.scaled_dot_product_attention.default.name()
    ways = [[way.opset_introduced for way in t.functions[attention]] for t in tables.values()]
    assert ways[0] != ways[1]
    assert [t.opset_version for t in tables.values()] == [20, 23]


def test_an_operator_that_someone_adds_is_not_in_the_next_table():
    add = torch.ops.aten.add.Tensor
    with table_read_once():
        mine = table()
        known = len(mine.get_decomps(add))
        mine.register_op(add, lambda a, b: a)
        assert len(mine.get_decomps(add)) == known + 1
        assert len(table().get_decomps(add)) == known


def test_torch_is_as_it_was_afterwards():
    reads = vars(Registry)["from_torchlib"]
    with pytest.raises(ZeroDivisionError), table_read_once():
        1 / (vars(Registry)["from_torchlib"] is reads)
    assert vars(Registry)["from_torchlib"] is reads


def test_a_torch_that_reads_its_table_elsewhere_exports_as_it_does(monkeypatch):
    monkeypatch.delattr(Registry, "from_torchlib")
    with table_read_once():
        assert not hasattr(Registry, "from_torchlib")
