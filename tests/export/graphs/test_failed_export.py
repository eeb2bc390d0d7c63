"""A failed trace is an error without the colors that torch.onnx.export has in its texts."""

import torch
from torch import nn

from smelt.core.errors import RunError
from smelt.export.graphs.attention import GraphSpec
from smelt.export.graphs.export_graph import export_graph
from tests.support.expected_errors import raises_code


class Fixed(nn.Module):
    """Its forward fixes the number of rows, which the graph shall not."""

    attentions = ()

    def forward(self, x):
        """Return one row, expanded."""
        return x[:1].expand(len(x), -1) + torch.ones(2, 1)


def test_failed_export_has_no_terminal_codes():
    graph = GraphSpec("model", Fixed().eval(), (torch.ones(2, 3),), ["x"], ["y"], ({0: "rows"},))
    with raises_code("export-failed", RunError) as excinfo:
        export_graph(graph, "ort-cpu", 20)
    assert "\x1b" not in str(excinfo.value)
