"""What is replaced in a program gives torch's own graph; what is not known here is left to torch."""

import pytest
import torch
from torch import nn
from torch.onnx._internal.exporter import _fx_passes

from smelt.export.graphs.single_trace import replace_unsupported_ops, single_trace
from tests.support.graphs import graph_outline

SECOND_TRACE = _fx_passes.decompose_with_registry


class Each(nn.Module):
    """Every operator that is replaced, and sizes that the inputs share."""

    def forward(self, x, mask, num_kept):
        """x float32 [B, S, 8]; mask int64 [B, S]; kept int64 []."""
        length = mask.shape[1]
        heads = torch.dropout(x, 0.1, False).unflatten(2, (2, 4)).transpose(1, 2).contiguous()
        a, b = heads.chunk(2, dim=-1)
        merged = torch.cat([-b, a], -1).transpose(1, 2).flatten(2)
        bias = (1.0 - mask.to(merged.dtype)).to(x.device, x.dtype)
        index_sums = (torch.arange(length) + torch.arange(length)[:, None]).flatten()
        table = torch.min(index_sums, torch.ones_like(index_sums)).reshape(1, 1, length, length)
        n = num_kept.item()
        torch._check(n >= 1)
        torch._check(n <= length)
        last = merged.narrow(1, length - n, n).sum(1)
        flat_rows = x.flatten(0, 1)  # their number is a product, which what is made of them takes from it
        high = torch.floor(flat_rows / 16)
        stacked = torch.stack([flat_rows - 16 * high, high + torch.full((), 3.0)], -1).flatten(-2).flatten(1)
        unit = stacked / torch.linalg.vector_norm(stacked, dim=-1, keepdim=True)
        log_distances = torch.abs(stacked) + 1
        log_distances += torch.full_like(stacked, 2.0)
        log_distances = torch.log(log_distances).permute(1, 0)
        last = last.to(torch.int32)
        codes = nn.functional.pad(torch.arange(0, 14, 2).reshape(1, 7), (0, 1))  # as unpacked weights
        levels = torch.arange(0, 32, 2).to(torch.float32).reshape(1, 16)
        log_distances = log_distances + torch.gather(torch.pow(2.0, levels), 1, codes).sum(
            1, keepdim=True
        ).squeeze(1)
        return merged + bias[:, :, None], table.to(torch.float32), unit * (unit < 1), last, log_distances


def inputs():
    x = torch.arange(2 * 5 * 8, dtype=torch.float32).reshape(2, 5, 8)
    return x, torch.ones(2, 5, dtype=torch.int64), torch.tensor(2)


AXES = ({0: "batch", 1: "length"}, {0: "batch", 1: "length"}, None)


def exported(module, values, axes, outputs=None):
    with torch.no_grad():
        return torch.onnx.export(
            module.eval(),
            values,
            None,
            dynamo=True,
            opset_version=20,
            verbose=False,
            dynamic_shapes=axes,
            output_names=outputs,
        ).model_proto


def program_of(module, *values):
    with torch.no_grad():
        return torch.export.export(module.eval(), values, strict=False)


def targets(program):
    return [str(node.target) for node in program.graph.nodes]


def test_single_trace_graph_equals_second_trace_graph(monkeypatch):
    torchs = exported(Each(), inputs(), AXES, list("abcde"))
    monkeypatch.setattr(_fx_passes, "decompose_with_registry", lambda *_: pytest.fail("traced again"))
    with single_trace():
        single_traced = exported(Each(), inputs(), AXES, list("abcde"))
    assert list(graph_outline.outline_lines(single_traced)) == list(graph_outline.outline_lines(torchs))
    op_types = {node.op_type for node in single_traced.graph.node}
    assert {"Split", "Reshape", "Min", "Slice", "Sub", "Cast"} <= op_types


class Rare(nn.Module):
    def forward(self, x):
        return torch.special.erfcx(x.flatten(0, 1))


class InPlace(nn.Module):
    """What is changed is a view of something else."""

    def forward(self, x):
        return (x * 2).flatten(0, 1).add_(1)


class ReadAgain(nn.Module):
    """What is changed was read before, as a view, which changes too."""

    def forward(self, x):
        doubled = x * 2
        view = doubled.flatten(0, 1)
        return doubled.add_(1).flatten(0, 1) + view


class OfCaller(nn.Module):
    """What is changed is an input."""

    def forward(self, x):
        return x.add_(1).flatten(0, 1)


class Flat(nn.Module):
    def __init__(self, dynamic):
        super().__init__()
        self.dynamic = dynamic

    def forward(self, x):
        return x.flatten(1, 2), torch.arange(x.shape[self.dynamic])


@pytest.mark.parametrize("module", [Rare(), InPlace(), ReadAgain(), OfCaller()])
def test_program_with_unsupported_operator_is_unchanged(module):
    program = program_of(module, torch.ones(2, 3))
    initial_targets = targets(program)
    assert "aten.flatten.using_ints" in initial_targets
    assert not replace_unsupported_ops(program)
    assert targets(program) == initial_targets


@pytest.mark.parametrize(("shape", "dynamic"), [((2, 5, 3), 1), ((2, 3, 5), 2)])
def test_size_product_is_not_retraced(shape, dynamic, monkeypatch):
    values, axes = (torch.ones(shape),), ({dynamic: "length"},)
    torchs = exported(Flat(dynamic), values, axes, ["y", "z"])
    monkeypatch.setattr(_fx_passes, "decompose_with_registry", lambda *_: pytest.fail("traced again"))
    with single_trace():
        assert list(graph_outline.outline_lines(exported(Flat(dynamic), values, axes, ["y", "z"]))) == list(
            graph_outline.outline_lines(torchs)
        )


@pytest.mark.parametrize("trains", [False, True])
def test_training_dropout_is_decomposed_by_torch(trains):
    program = program_of(nn.Identity(), torch.ones(2))
    x = next(node for node in program.graph.nodes if node.op == "placeholder")
    graph = program.graph_module.graph
    with graph.inserting_after(x):
        graph.call_function(torch.ops.aten.dropout.default, (x, 0.1, trains))
    assert replace_unsupported_ops(program) is not trains


def test_torch_is_restored_after_context():
    with pytest.raises(ZeroDivisionError), single_trace():
        1 / (_fx_passes.decompose_with_registry is SECOND_TRACE)
    assert _fx_passes.decompose_with_registry is SECOND_TRACE


def test_unknown_torch_version_exports_without_patch(monkeypatch):
    monkeypatch.delattr(_fx_passes, "decompose_with_registry")
    with single_trace():
        assert not hasattr(_fx_passes, "decompose_with_registry")
