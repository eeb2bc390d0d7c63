"""The files of the onnx stage: each graph traced, written, simplified, spelled out, and checked by ONNX."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.errors import RunError
from smelt.core.stage import Context
from smelt.runtime.images.batch import ImageBatch

if TYPE_CHECKING:
    from smelt.export.graphs.graph import Graph
    from smelt.export.parity.reference import Reference
    from smelt.export.stage.settings import OnnxSettings
    from smelt.runtime.batch import Tokens


def write_all(
    graphs: list[Graph], settings: OnnxSettings, reference: Reference, ctx: Context
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, str]]]:
    """Write all graphs; return by graph what the report tells of it, and of which modules its nodes are."""
    batch = reference.batch
    tokens = None if isinstance(batch, ImageBatch) else batch.input_ids[batch.attention_mask == 1]
    details: dict[str, dict[str, Any]] = {}
    homes: dict[str, dict[str, str]] = {}
    for at, graph in enumerate(graphs):
        ctx.progress(at, len(graphs) + 1, graph.name)
        details[graph.name] = _write(graph, settings, tokens, ctx, homes)
    return details, homes


def _write(
    graph: Graph,
    settings: OnnxSettings,
    tokens: Tokens | None,
    ctx: Context,
    homes: dict[str, dict[str, str]],
) -> dict[str, Any]:
    """Export one graph and simplify it, in float32; return what the report tells of it.

    Args:
        graph: which.
        settings: the stage's.
        tokens: int64 [n], real ones, to compare the simplified graph on; None of a graph of images.
        ctx: its `out` gets the graph.
        homes: gets by graph the modules that its nodes are of.
    """
    from smelt.export.graph_files import give_defaults, write_graph
    from smelt.export.graphs.gemm import join_biases_file
    from smelt.export.graphs.of_model import export_graph
    from smelt.export.load_time import spell_out_file
    from smelt.export.precision.blocks import homes_of
    from smelt.export.simplify import simplify_file

    began = time.perf_counter()
    path = ctx.out / f"{graph.name}.onnx"
    model = export_graph(graph, settings.graphs_of, ctx.details["opset"])
    exported = time.perf_counter()
    homes[graph.name] = homes_of(model, graph.module)
    write_graph(model, path)
    del model  # simplifying holds two graphs of its own
    if settings.simplify and (reason := simplify_file(path, tokens)) is not None:
        ctx.warnings.append(reason.prefixed(f"{graph.name}: not simplified: "))
    spell_out_file(path)
    if settings.target == "ort-cpu":
        join_biases_file(path)
    if graph.optional and settings.graphs_of not in (
        "tensorrt",
        "openvino",
    ):  # to which a default is a constant
        give_defaults(path, graph.optional)
    return {"export_seconds": round(exported - began, 3), "seconds": round(time.perf_counter() - began, 3)}


def tell_of_tensorrt(target: str, graphs: Iterable[str], ctx: Context) -> None:
    """Warn of what TensorRT would reject: the engine may be built elsewhere, long after this step."""
    if target != "tensorrt":
        return
    from smelt.export.tensorrt.preflight import load_graph, preflight

    paths = [ctx.out / f"{name}.onnx" for name in graphs]
    for path in paths:
        for problem in preflight(load_graph(path), path):
            one = problem.as_message()
            ctx.warn(one.code, one.message, file=one.file)


def checked(path: Path) -> dict[str, Any]:
    """Let ONNX check the finished graph; return how many nodes it has, and of which operators.

    Raises:
        RunError: it is not valid.
    """
    import onnx

    from smelt.export.graph_files import read_graph

    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise RunError(
            f"{path.name}: the exported graph is not valid ONNX: {error}", code="invalid-graph"
        ) from error
    nodes = read_graph(path, values=False).graph.node
    return {"nodes": len(nodes), "operators": dict(Counter(n.op_type for n in nodes).most_common())}
