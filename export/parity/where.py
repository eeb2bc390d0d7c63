"""Where a graph begins to differ from torch: the first layer whose output is another.

Asked only after an output differed, with dequantized weights. Nodes find their layers by the names of their
constants; the graph is run with their outputs exposed, on the inputs on which it differed.

Shapes: B = batch, L = source length or prompt, S = tokens fed at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from smelt.export.graph_files import read_graph, write_graph
from smelt.export.graphs.graph import Graph
from smelt.export.parity.compare import TOLERANCES
from smelt.export.parity.reference import Reference, exact_of
from smelt.runtime.causal import positions
from smelt.runtime.layers.quantized import QuantizedLinear

Values = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class _Call:
    """One call of a graph: its inputs, and which part [B, S] of a layer's output [B, all] it computes.

    real: bool [B, S], where no padding is.
    """

    feeds: Values
    part: slice
    real: NDArray[np.bool_]


def first_difference(folder: Path, graphs: list[Graph], said: str, model: Any, reference: Reference) -> str:
    """Return a sentence that names the first layer of a graph whose output differs, or nothing.

    Args:
        folder: with the graphs, in float32.
        graphs: all graphs of the model.
        said: what was found, beginning with the graph's name and a colon.
        model: the parent.
        reference: the batch and tokens on which it differs.
    """
    graph = next((g for g in graphs if said.startswith(f"{g.name}:")), None)
    if graph is None:
        return ""
    name = graph.name
    places = _places(read_graph(folder / f"{name}.onnx", values=False), graph.module)
    expected = _layer_outputs(model, reference, {id(graph.module.get_submodule(p)): p for p in places})
    try:
        for call, got in _calls(folder, name, reference, [value for _, value in places.values()]):
            for path, whole in expected.items():
                node, value = places[path]
                if value in got and _differs(whole, got[value], call):
                    return f" The first layer that differs is {path} (node '{node}')."
    except Exception:  # the graph with its values exposed cannot be run; the difference is told without them
        return ""
    return ""


def _places(model: Any, module: nn.Module) -> dict[str, tuple[str, str]]:
    """Return for each layer (a norm or a product) the name of its last node and of that node's output.

    A constant that several nodes read says nothing: optimizers make one of equal ones, say of norms' ones.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    readers = Counter(name for node in model.graph.node for name in node.input)
    layers = {name for name, layer in module.named_modules() if _is_layer(layer)}
    found: dict[str, tuple[str, str]] = {}
    below: dict[str, list[str]] = {name: [name] for name in constants}  # what constant values are made of
    for node in model.graph.node:
        given = [name for name in node.input if name]
        sources = [source for name in given for source in below.get(name, ())]
        if given and all(name in below for name in given):
            below.update(dict.fromkeys(node.output, sources))
            continue
        for source in sources:
            path = _layer_of(source, layers)
            if path is not None and readers[source] == 1:
                found[path] = (node.name, node.output[0])
    return found


def _layer_of(constant: str, layers: set[str]) -> str | None:
    parts = constant.split(".")
    return next((path for i in range(len(parts), 0, -1) if (path := ".".join(parts[:i])) in layers), None)


def _is_layer(module: nn.Module) -> bool:
    if isinstance(module, QuantizedLinear | nn.Linear):
        return True
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 1  # a norm


def _layer_outputs(model: Any, reference: Reference, wanted: dict[int, str]) -> Values:
    """Return the outputs of the modules in `wanted` (by identity), as torch computes them, in its order."""
    outputs: Values = {}

    def keep(path: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            outputs.setdefault(path, output.detach().numpy())

        return hook

    hooks = [m.register_forward_hook(keep(wanted[id(m)])) for m in model.modules() if id(m) in wanted]
    try:
        exact_of(model, reference)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def _differs(whole: NDArray[Any], got: NDArray[Any], call: _Call) -> bool:
    expected = whole[:, call.part] if whole.ndim == 3 else whole
    if expected.size != got.size:
        return False  # of another part of the computation
    real = call.real if whole.ndim == 3 else slice(None)
    expected, got = expected[real], got.reshape(expected.shape)[real]
    spread = float(np.std(expected, dtype=np.float64)) or 1.0
    largest = TOLERANCES["fp32"].largest or 0.0
    return bool(np.abs(expected - got).max(initial=0.0) > largest * spread)


def _calls(
    folder: Path, name: str, reference: Reference, values: list[str]
) -> Iterator[tuple[_Call, Values]]:
    """Run the graph `name` as a runner would, call by call; yield each call with its outputs and `values`."""
    from smelt.runtime.backends.onnx_session import open_session

    batch = reference.batch
    real = batch.attention_mask == 1
    ids = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    if name == "encoder_model" or reference.tokens is None:
        types = np.zeros_like(batch.input_ids) if batch.token_type_ids is None else batch.token_type_ids
        call = _Call({**ids, "token_type_ids": types}, slice(None), real)
        yield call, _run(_exposed(folder, name, values), call.feeds)
        return
    session = _exposed(folder, name, values)
    state = _empty_caches(session, len(real))
    if name == "model":
        yield from _causal_calls(session, state, reference)
        return
    encoder: Any = open_session(folder / "encoder_model.onnx")
    state |= _as_past(_run(encoder, ids))
    for at, tokens in enumerate(reference.tokens):
        feeds = {"input_ids": tokens[:, None], "encoder_attention_mask": batch.attention_mask, **state}
        got = _run(session, feeds)
        yield _Call(feeds, slice(at, at + 1), np.ones((len(real), 1), dtype=bool)), got
        state |= _as_past(got)


def _causal_calls(session: Any, state: Values, reference: Reference) -> Iterator[tuple[_Call, Values]]:
    assert reference.tokens is not None
    batch = reference.batch
    ids = np.concatenate([batch.input_ids, reference.tokens[1:].T], axis=1)
    mask = np.concatenate([batch.attention_mask, np.ones_like(reference.tokens[1:].T)], axis=1)
    prompt, total = batch.input_ids.shape[1] - 1, ids.shape[1]
    stretches = [(0, prompt), *((at, at + 1) for at in range(prompt, total))]
    for begin, end in stretches:
        if end > begin:
            places = positions(mask[:, :end])[:, begin:]
            feeds = {"input_ids": ids[:, begin:end], "attention_mask": mask[:, :end], "position_ids": places}
            feeds |= {"num_logits_to_keep": np.array(0, dtype=np.int64), **state}
            got = _run(session, feeds)
            yield _Call(feeds, slice(begin, end), mask[:, begin:end] == 1), got
            state = _as_past(got)


def _exposed(folder: Path, name: str, values: list[str]) -> Any:
    """Open the graph `name` with the named values as outputs too."""
    from onnx import ValueInfoProto

    from smelt.runtime.backends.onnx_session import open_session

    path = folder / f"{name}.onnx"
    model = read_graph(path)
    there = {output.name for output in model.graph.output}
    model.graph.output.extend(ValueInfoProto(name=v) for v in dict.fromkeys(values) if v not in there)
    with TemporaryDirectory(dir=folder) as beside:
        write_graph(model, Path(beside, path.name))
        return open_session(Path(beside, path.name))


def _run(session: Any, feeds: Values) -> Values:
    names = [i.name for i in session.get_inputs()]
    results = session.run(None, {name: np.asarray(feeds[name], order="C") for name in names})
    return dict(zip([o.name for o in session.get_outputs()], results, strict=True))


def _empty_caches(session: Any, rows: int) -> Values:
    caches = [i for i in session.get_inputs() if i.name.startswith("past_key_values.")]
    own = [i for i in caches if ".encoder." not in i.name]
    return {i.name: np.zeros((rows, i.shape[1], 0, i.shape[3]), dtype=np.float32) for i in own}


def _as_past(outputs: Values) -> Values:
    """Return the caches among `outputs` under the names of the next call's inputs."""
    mark = "present."
    return {f"past_key_values.{n[len(mark) :]}": v for n, v in outputs.items() if n.startswith(mark)}
