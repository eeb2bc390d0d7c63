"""Select the nodes of a half-precision graph that remain float32, and their blocks.

Norms remain float32 in both. In float16 so do nodes whose outputs, inputs or sums come close to its range: an
FFN's last layer and the residual stream after it, attention with very large scores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from smelt.export.precision.value_ranges import ValueRanges

FP16_MAX = 65504.0
# half of it: other samples have larger values than the calibration samples, and masks are 20,000
FP16_SAFE_MAX = FP16_MAX / 2
_NORM_OPS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
_SCOPES_KEY = "pkg.torch.onnx.name_scopes"


@dataclass
class Fp32Selection:
    """The parts of a graph that remain float32.

    nodes: by the name of their first output. blocks: names of modules with the largest value of their
    outputs, inputs or sums. norms: names of modules. values: those that are too large.
    """

    nodes: set[str] = field(default_factory=set)
    blocks: dict[str, float] = field(default_factory=dict)
    norms: set[str] = field(default_factory=set)
    values: set[str] = field(default_factory=set)


def module_of_nodes(model: Any, module: nn.Module) -> dict[str, str]:
    """Return the innermost module of `module` that each node of an onnx.ModelProto was exported from.

    It is found by the names of the node and of its outputs: simplifying preserves only these.
    """
    homes: dict[str, str] = {}
    for node in model.graph.node:
        scopes = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES_KEY), "[]")
        home = ""
        for scope in re.findall(r"'([^']*)'", scopes):
            name = ".".join(part for part in scope.split(".") if not part.startswith("slice("))
            # calls of a replaced forward are named after the caller
            inside = (place for place in (name, f"{home}.{name}") if name)
            home = next((place for place in inside if _submodule(module, place) is not None), home)
        if home:
            homes.update(dict.fromkeys((node.name, *node.output), home))
    return homes


def select_fp32(
    model: Any, module: nn.Module, homes: Mapping[str, str], ranges: ValueRanges | None
) -> Fp32Selection:
    """Return the parts of the float32 graph `model` that remain float32.

    Args:
        model: an onnx.ModelProto.
        module: the exported module.
        homes: the module of each node, by `module_of_nodes`.
        ranges: of its values; None if the other precision has the range of float32.
    """
    wide = Fp32Selection()
    values = {} if ranges is None else ranges.values
    wide.values = {name for name, value in values.items() if not value <= FP16_SAFE_MAX}
    sums = {} if ranges is None else {name: v for name, v in ranges.sums.items() if not v <= FP16_MAX}
    above: dict[str, str] = {}
    for node in model.graph.node:
        block = homes.get(node.name) or homes.get(node.output[0]) or ""
        if node.op_type in _NORM_OPS or is_norm_module(module, block):
            wide.nodes.add(node.output[0])
            wide.norms.add(block)
        # an optimizer's own nodes are assigned to the module of their inputs
        block = block or next((above[name] for name in node.input if name in above), "")
        above.update(dict.fromkeys(node.output, block))
        given = [name for name in (*node.input, *node.output) if name in wide.values]
        largest = [values[name] for name in given] + [sums[n] for n in node.output if n in sums]
        if largest and node.output[0] not in wide.nodes:
            wide.nodes.add(node.output[0])
            wide.blocks[block] = max(*largest, wide.blocks.get(block, 0.0))
    return wide


def is_norm_module(module: nn.Module, block: str) -> bool:
    """Return whether the block is a norm: its weight is a vector."""
    weight = getattr(_submodule(module, block), "weight", None) if block else None
    return isinstance(weight, Tensor) and weight.dim() == 1


def _submodule(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None
