"""Accept the empty caches that a tool creates for a first step with the heads and width that it guesses.

Optimum (0.1.0) and transformers.js (up to 3) read heads and width from the config in different ways. A model
with fewer heads in one layer, or with a separate head width, would get caches that its graph does not accept.
A Reshape gives empty caches the right shape; it does not change later ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.files import read_json_object
from smelt.families.registry import find_family

_HEADS_KEYS = ("num_attention_heads", "encoder_attention_heads", "num_heads", "n_head")
_WIDTH_KEYS = ("hidden_size", "d_model", "n_embd")


def accept_any_empty_cache(model: Any, config: Mapping[str, Any]) -> int:
    """Make every cache input of the onnx.ModelProto `model` accept any shape while it is empty, in place.

    Caches of the shape that `config` directly gives are not changed.

    Returns:
        The number of changed caches.
    """
    from onnx import helper

    heads, width = _first_setting(config, _HEADS_KEYS), _first_setting(config, _WIDTH_KEYS)
    usual = (heads, width // heads) if heads and width else None
    done = any("caches.rows" in node.output for node in model.graph.node)  # a package that was read again
    odd = [
        v
        for v in model.graph.input
        if not done and _is_self_attention_cache(v.name) and _cache_shape(v) != usual
    ]
    nodes: list[Any] = []
    for value in odd:
        nodes += _reshape_nodes(model, value)
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
        if value.name.startswith("past_key_values.") and _cache_shape(value) != usual:
            _make_dynamic(value)
    return len(odd)


def _is_self_attention_cache(name: str) -> bool:
    """Return whether it is a self-attention cache; a cross-attention cache is not read while it is empty."""
    return name.startswith("past_key_values.") and ".encoder." not in name


def _reshape_nodes(model: Any, value: Any) -> list[Any]:
    """Return the nodes that give `value` its heads and width."""
    import numpy as np
    from onnx import helper, numpy_helper

    name, (heads, width) = value.name, _cache_shape(value)
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


def _cache_shape(value: Any) -> tuple[int, int]:
    """Return heads and width of a cache [B, H, P, d]."""
    dims = value.type.tensor_type.shape.dim
    return dims[1].dim_value, dims[3].dim_value


def _make_dynamic(value: Any) -> None:
    """Make heads and width of `value` dynamic."""
    dims = value.type.tensor_type.shape.dim
    for place, what in ((1, "heads"), (3, "width")):
        dims[place].dim_param = f"{what}_of_{value.name}"


def require_cache_per_layer(source: Path, graph: str, tool: str) -> None:
    """Require that the graph `graph` in `source` has a cache for each layer of the config.

    A tool that creates the first caches uses the config. A model without this graph needs none.

    Raises:
        InputError: attention blocks were removed (`drop-layers`), and their caches with them.
    """
    from smelt.export.graph_files import read_graph

    config = read_json_object(source / "config.json")
    family = find_family(config)
    counts = [s.num_layers(config) for s in family.stacks(config) if s.causal] if family else []
    path = source / f"{graph}.onnx"
    if not counts or counts[0] is None or not path.is_file():
        return
    names = [i.name.split(".") for i in read_graph(path, values=False).graph.input]
    kinds = Counter(".".join(n[2:]) for n in names if n[0] == "past_key_values")
    for kind, found in sorted(kinds.items()):
        if found != counts[0]:
            raise InputError(
                f"its decoder has caches ({kind}) for only {found} of {counts[0]} layers, because"
                f" 'drop-layers' removed attention blocks, and {tool} creates one for each layer of"
                " config.json.",
                code="unsupported-structure",
            )


def require_float_caches(source: Path, graph: str, tool: str) -> None:
    """Require that the caches of the graph `graph` in `source` are not int8.

    A tool that creates the first caches creates float ones. A model without this graph needs none.

    Raises:
        InputError: they are int8.
    """
    from smelt.export.graph_files import read_graph
    from smelt.export.precision.kv_cache.int8_kv_cache import has_int8_caches

    path = source / f"{graph}.onnx"
    if path.is_file() and has_int8_caches(read_graph(path, values=False)):
        raise InputError(
            f"its caches are int8 (`onnx: {{kv_cache: int8}}`), and {tool} creates float caches. Export it"
            " with kv_cache: float for this format.",
            code="unsupported-kv-cache",
        )


def _first_setting(config: Mapping[str, Any], words: tuple[str, ...]) -> int | None:
    return next((config[word] for word in words if isinstance(config.get(word), int)), None)
