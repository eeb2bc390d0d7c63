"""Which nodes of a graph stay float32 where the rest becomes float16 or bfloat16, and of which blocks.

Norms stay in both. In float16 so does whatever gives, reads or adds up what float16 cannot hold with room to
spare: an FFN's last product and the residual stream behind it, attention whose scores run away.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from smelt.export.precision.ranges import Ranges

LARGEST = 65504.0
# half of it: other rows have larger values than those that were looked at, and masks are 20,000
SAFE = LARGEST / 2
_NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
_SCOPES = "pkg.torch.onnx.name_scopes"


@dataclass
class Wide:
    """What of a graph stays float32.

    nodes: by the name of their first output. blocks: names of modules with the largest value that they give,
    read or add up. norms: names of modules. values: those that are too large.
    """

    nodes: set[str] = field(default_factory=set)
    blocks: dict[str, float] = field(default_factory=dict)
    norms: set[str] = field(default_factory=set)
    values: set[str] = field(default_factory=set)


def homes_of(model: Any, module: nn.Module) -> dict[str, str]:
    """Return the innermost module of `module` that each node of an onnx.ModelProto was exported from.

    By the names of the node and of its outputs: simplifying keeps these, and not where a node came from.
    """
    homes: dict[str, str] = {}
    for node in model.graph.node:
        scopes = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), "[]")
        home = ""
        for scope in re.findall(r"'([^']*)'", scopes):
            name = ".".join(part for part in scope.split(".") if not part.startswith("slice("))
            # what a replaced forward calls is named from where it is called
            inside = (place for place in (name, f"{home}.{name}") if name)
            home = next((place for place in inside if _submodule(module, place) is not None), home)
        if home:
            homes.update(dict.fromkeys((node.name, *node.output), home))
    return homes


def wide_parts(model: Any, module: nn.Module, homes: Mapping[str, str], ranges: Ranges | None) -> Wide:
    """Return what of the float32 graph `model` stays float32.

    Args:
        model: an onnx.ModelProto.
        module: what it was made from.
        homes: the module that each node is of, by `homes_of`.
        ranges: how large its values become; None where the other precision holds all that float32 does.
    """
    wide = Wide()
    values = {} if ranges is None else ranges.values
    wide.values = {name for name, value in values.items() if not value <= SAFE}
    sums = {} if ranges is None else {name: v for name, v in ranges.sums.items() if not v <= LARGEST}
    above: dict[str, str] = {}
    for node in model.graph.node:
        block = homes.get(node.name) or homes.get(node.output[0]) or ""
        if node.op_type in _NORMS or is_norm(module, block):
            wide.nodes.add(node.output[0])
            wide.norms.add(block)
        # an optimizer's own nodes are told to be where what they read was made
        block = block or next((above[name] for name in node.input if name in above), "")
        above.update(dict.fromkeys(node.output, block))
        given = [name for name in (*node.input, *node.output) if name in wide.values]
        largest = [values[name] for name in given] + [sums[n] for n in node.output if n in sums]
        if largest and node.output[0] not in wide.nodes:
            wide.nodes.add(node.output[0])
            wide.blocks[block] = max(*largest, wide.blocks.get(block, 0.0))
    return wide


def is_norm(module: nn.Module, block: str) -> bool:
    """Say whether the block is a norm: its weight is one row."""
    weight = getattr(_submodule(module, block), "weight", None) if block else None
    return isinstance(weight, Tensor) and weight.dim() == 1


def _submodule(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None
