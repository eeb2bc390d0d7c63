"""Caches that a tool makes for a first step: of no places, but with the heads and width that it guesses.

Optimum (0.1.0) and transformers.js (up to 3) read heads and width from the config in ways of their own. A
model with fewer heads in one layer, or with a width of heads that is said apart, would get caches that its
graph does not take. A Reshape gives those the right shape; of all later caches it changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.files import read_json
from smelt.families.registry import find_family

_HEADS = ("num_attention_heads", "encoder_attention_heads", "num_heads", "n_head")
_WIDTH = ("hidden_size", "d_model", "n_embd")


def take_any_first_cache(model: Any, config: Mapping[str, Any]) -> int:
    """Let every cache of the onnx.ModelProto `model` be of any shape while it has no places, in place.

    Caches of the shape that `config` says in the plainest way stay as they are.

    Returns:
        How many caches needed it.
    """
    from onnx import helper

    heads, width = _first(config, _HEADS), _first(config, _WIDTH)
    usual = (heads, width // heads) if heads and width else None
    done = any("caches.rows" in node.output for node in model.graph.node)  # a package that was read again
    odd = [v for v in model.graph.input if not done and _is_own(v.name) and _shape(v) != usual]
    nodes: list[Any] = []
    for value in odd:
        nodes += _reshaped(model, value)
    if odd:
        old = [*model.graph.node]
        names = {value.name: f"{value.name}.shaped" for value in odd}
        for node in old:
            for place, name in enumerate(node.input):
                node.input[place] = names.get(name, name)
        ids = "input_ids"
        rows = helper.make_node("Shape", [ids], ["caches.rows"], "caches.rows", start=0, end=1)
        del model.graph.node[:]
        model.graph.node.extend([rows, *nodes, *old])
    for value in model.graph.input:
        if value.name.startswith("past_key_values.") and _shape(value) != usual:
            _free(value)
    return len(odd)


def _is_own(name: str) -> bool:
    """Say whether it is a cache of self-attention; one of cross-attention is not read while it is empty."""
    return name.startswith("past_key_values.") and ".encoder." not in name


def _reshaped(model: Any, value: Any) -> list[Any]:
    """Return the nodes that give `value` its heads and width."""
    import numpy as np
    from onnx import helper, numpy_helper

    name, (heads, width) = value.name, _shape(value)
    for part, number in (("heads", heads), ("width", width)):
        constant = numpy_helper.from_array(np.array([number], np.int64), f"{name}.{part}")
        model.graph.initializer.append(constant)
    places, shape = f"{name}.places", f"{name}.shape"
    return [
        helper.make_node("Shape", [name], [places], places, start=2, end=3),
        helper.make_node(
            "Concat", ["caches.rows", f"{name}.heads", places, f"{name}.width"], [shape], shape, axis=0
        ),
        helper.make_node("Reshape", [name, shape], [f"{name}.shaped"], f"{name}.shaped", allowzero=1),
    ]


def _shape(value: Any) -> tuple[int, int]:
    """Return heads and width of a cache [B, H, P, d]."""
    dims = value.type.tensor_type.shape.dim
    return dims[1].dim_value, dims[3].dim_value


def _free(value: Any) -> None:
    """Let heads and width of `value` be anything."""
    dims = value.type.tensor_type.shape.dim
    for place, what in ((1, "heads"), (3, "width")):
        dims[place].dim_param = f"{what}_of_{value.name}"


def require_a_cache_for_each_layer(source: Path, graph: str, tool: str) -> None:
    """Require that the graph called `graph` in `source` has a cache for each layer that the config says.

    A tool that makes the first caches goes by the config. A model that has no such graph needs none.

    Raises:
        InputError: some attentions were taken out (`drop-layers`), and their caches with them.
    """
    from smelt.export.graph_files import read_graph

    config = read_json(source / "config.json")
    family = find_family(config)
    counts = [s.count(config) for s in family.stacks(config) if s.causal] if family else []
    path = source / f"{graph}.onnx"
    if not counts or counts[0] is None or not path.is_file():
        return
    names = [i.name.split(".") for i in read_graph(path, values=False).graph.input]
    kinds = Counter(".".join(n[2:]) for n in names if n[0] == "past_key_values")
    for kind, found in sorted(kinds.items()):
        if found != counts[0]:
            raise InputError(
                f"its decoder has caches ({kind}) for {found} of {counts[0]} layers, since 'drop-layers' took"
                f" attentions out of others, and {tool} makes one for each layer of config.json.",
                code="unsupported-structure",
            )


def require_float_caches(source: Path, graph: str, tool: str) -> None:
    """Require that the caches of the graph called `graph` in `source` are not int8.

    A tool that makes the first caches makes float ones. A model that has no such graph needs none.

    Raises:
        InputError: they are.
    """
    from smelt.export.graph_files import read_graph
    from smelt.export.precision.caches.codes import has_int8_caches

    path = source / f"{graph}.onnx"
    if path.is_file() and has_int8_caches(read_graph(path, values=False)):
        raise InputError(
            f"its caches are int8 (`onnx: {{kv_cache: int8}}`), and {tool} makes float ones; export it with"
            " kv_cache: float for this form.",
            code="unsupported-kv-cache",
        )


def _first(config: Mapping[str, Any], words: tuple[str, ...]) -> int | None:
    return next((config[word] for word in words if isinstance(config.get(word), int)), None)
