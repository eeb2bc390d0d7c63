"""Write the graphs of the onnx stage: trace, simplify, expand placeholders and check each of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.errors import RunError
from smelt.core.stage import Context
from smelt.runtime.images.image_batch import ImageBatch

if TYPE_CHECKING:
    from smelt.export.graphs.graph_spec import GraphSpec
    from smelt.export.onnx_export.settings import OnnxSettings
    from smelt.export.parity.torch_reference import TorchReference
    from smelt.runtime.batch import Tokens


def write_graphs(
    graphs: list[GraphSpec], settings: OnnxSettings, reference: TorchReference, ctx: Context
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, str]]]:
    """Write all graphs; return by graph the details for the report, and the modules of its nodes."""
    batch = reference.batch
    tokens = None if isinstance(batch, ImageBatch) else batch.input_ids[batch.attention_mask == 1]
    details: dict[str, dict[str, Any]] = {}
    homes: dict[str, dict[str, str]] = {}
    for at, graph in enumerate(graphs):
        ctx.progress(at, len(graphs) + 1, graph.name)
        details[graph.name] = _write_graph(graph, settings, tokens, ctx, homes)
    return details, homes


def _write_graph(
    graph: GraphSpec,
    settings: OnnxSettings,
    tokens: Tokens | None,
    ctx: Context,
    homes: dict[str, dict[str, str]],
) -> dict[str, Any]:
    """Export one graph in float32 and simplify it; return the details for the report.

    Args:
        graph: the graph to export.
        settings: of the stage.
        tokens: int64 [n], real tokens to compare the simplified graph on; None for a graph of images.
        ctx: its `out` is the folder of the graph.
        homes: filled with the modules of each graph's nodes.
    """
    from smelt.export.expand_placeholders import expand_placeholders_in_file
    from smelt.export.graph_files import set_input_defaults, write_graph
    from smelt.export.graphs.export_graph import export_graph
    from smelt.export.graphs.fuse_bias import fuse_biases_in_file
    from smelt.export.precision.select_fp32 import module_of_nodes
    from smelt.export.simplify_graph import simplify_file

    began = time.perf_counter()
    path = ctx.out / f"{graph.name}.onnx"
    model = export_graph(graph, settings.graph_target, ctx.details["opset"])
    exported = time.perf_counter()
    homes[graph.name] = module_of_nodes(model, graph.module)
    write_graph(model, path)
    del model  # simplifying holds two graphs
    if settings.simplify and (reason := simplify_file(path, tokens)) is not None:
        ctx.warnings.append(reason.with_prefix(f"{graph.name}: not simplified: "))
    expand_placeholders_in_file(path)
    if settings.target == "ort-cpu":
        fuse_biases_in_file(path)
    if graph.input_defaults and settings.graph_target not in (
        "tensorrt",
        "openvino",
    ):  # it treats a default as a constant
        set_input_defaults(path, graph.input_defaults)
    return {"export_seconds": round(exported - began, 3), "seconds": round(time.perf_counter() - began, 3)}


def warn_about_tensorrt(target: str, graphs: Iterable[str], ctx: Context) -> None:
    """Warn about what TensorRT rejects now, because the engine may be built much later and elsewhere."""
    if target != "tensorrt":
        return
    from smelt.export.tensorrt.preflight import load_graph, preflight

    paths = [ctx.out / f"{name}.onnx" for name in graphs]
    for path in paths:
        for problem in preflight(load_graph(path), path):
            one = problem.as_message()
            ctx.warn(one.code, one.message, file=one.file)


def check_onnx_file(path: Path) -> dict[str, Any]:
    """Check the finished graph with ONNX; return the number of its nodes, and the number by operator.

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
