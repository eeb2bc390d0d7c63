"""The stage `fp16` of third-party graphs: float16, except for nodes that would overflow."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from smelt.core.artifact import Artifact, Format
from smelt.core.errors import InputError, ParityError
from smelt.core.messages import Message
from smelt.data.tasks import GRAPH_TASKS, Task
from smelt.export.onnx_models.normalize_graph import (
    copy_model_files,
    match_nodes,
    ordered_graphs,
)
from smelt.models.model_size import SizeInputs, StepSize, one_shot_size
from smelt.stage import Context, Settings, Stage

_MAX_NAMED_NODES = 3
# RMS difference in standard deviations of an output; float16 rounding gives 0.0005.
_WARN_DIFFERENCE = 0.02
_RANDOM = 0.1  # of an output's standard deviation: a larger difference than float16 causes
# the scales of Resize, outputs whose type an attribute sets, the bits of a float32, and operators that ONNX
# Runtime declares for float16 but cannot compute on the CPU
_FP32_OPS = (
    "Resize",
    "BitCast",
    "MeanVarianceNormalization",
    "ScatterElements",
    "ScatterND",
    "RandomNormal",
    "RandomUniform",
    "RandomNormalLike",
    "RandomUniformLike",
    "Bernoulli",
    "EyeLike",
)


class Fp16Settings(Settings):
    """Settings of `fp16`."""

    keep_fp32: tuple[str, ...] = Field(
        default=(), description="operators, or names or patterns of nodes, kept in float32"
    )
    calibration_samples: int = Field(
        default=16, ge=1, le=10_000, description="samples to measure value ranges on"
    )


class Fp16(Stage[Fp16Settings]):
    """Convert a third-party ONNX model to float16, for GPUs.

    Inputs and outputs remain float32, also in the bodies of If, Loop and Scan.
    Nodes remain float32 if their values on samples of the data come close to the
    range of float16, if they need values that it does not have (a constant of
    1e-12, the variance of a norm), or if their operators do not support it. On
    the CPU ONNX Runtime computes most operators in float32: the file is half as
    large, but not faster.

        - fp16: {}
        - fp16: {keep_fp32: [Softmax, /head/MatMul, /pooler/*]}
    """

    name: ClassVar[str] = "fp16"
    accepts: ClassVar[frozenset[Format]] = frozenset({"onnx"})
    produces: ClassVar[Format] = "onnx"
    source: ClassVar[str] = "operators kept in float32: onnxruntime.transformers.float16"
    version: ClassVar[int] = 5
    imported_only: ClassVar[bool] = True
    needs_float: ClassVar[bool] = True
    needs_float32: ClassVar[bool] = True
    settings_type: ClassVar[type[Settings]] = Fp16Settings
    tasks: ClassVar[frozenset[Task]] = frozenset(GRAPH_TASKS)

    @classmethod
    def check_graph(cls, settings: Fp16Settings, graph: Path) -> list[Message]:
        """Return an error if `keep_fp32` names a node that the graph does not have."""
        from smelt.export.onnx_models.normalize_graph import normalize_graph

        try:
            if settings.keep_fp32:
                _expand_kept([normalize_graph(graph)], settings.keep_fp32)
        except InputError as error:
            return [error.as_message()]
        return []

    @classmethod
    def estimate_size(cls, settings: Fp16Settings, inputs: SizeInputs) -> StepSize:
        """Return the estimated sizes of the step."""
        return one_shot_size(
            inputs, result=inputs.source.stored_as(2.0, 2.0), more_bytes=inputs.source.stored_bytes
        )

    def __call__(self, src: Artifact, settings: Fp16Settings, ctx: Context) -> None:
        """Write the float16 graph into `ctx.out`.

        Raises:
            InputError: `keep_fp32` matches no node.
            ParityError: an output is not finite where it was.
            RunError: ONNX Runtime cannot run the new graph.
        """
        from smelt.export.convert_to_half import convert_to_half
        from smelt.export.fp16_range import nodes_outside_fp16
        from smelt.export.graph_files import write_graph
        from smelt.export.onnx_models.graph_samples import (
            collect_samples,
            max_output_difference,
            require_imported,
            require_runnable,
            run_onnx_graph,
        )
        from smelt.export.onnx_models.normalize_graph import normalize_graph
        from smelt.export.onnx_models.output_comparison import OutputComparison
        from smelt.export.onnx_models.prepare_for_quantizer import constants_to_initializers
        from smelt.runtimes.onnx_import.signature import read_batch_axes

        require_imported(src, self.name)
        models = {path: normalize_graph(path) for path in ordered_graphs(src)}
        copy_model_files(src, ctx)
        feeds, is_real = collect_samples(src, ctx, settings.calibration_samples)
        if not is_real:
            ctx.warn(
                "made-up-inputs",
                "Value ranges were measured on random inputs, because the recipe has only test data. Add"
                " data: {calibration: FILE}.",
            )
        kept_names = _expand_kept(models.values(), settings.keep_fp32)
        num_float32, half_outputs, float_outputs, inputs = 0, [], [], []
        for path, model in models.items():
            constants_to_initializers(model)
            float_nodes = float32_nodes(model, kept_names)
            large = nodes_outside_fp16(model) | _overflowing_nodes(model, path.name, feeds[path.stem], ctx)
            ends = {value.name for value in (*model.graph.input, *model.graph.output)}
            convert_to_half(model, path.name, "fp16", float_nodes | large, ends)
            write_graph(model, ctx.out / path.name)
            num_float32 += len(large)
            inputs += feeds[path.stem]
            require_runnable(ctx.out / path.name, feeds[path.stem])
            half_outputs += run_onnx_graph(ctx.out / path.name, feeds[path.stem], ctx.threads)
            float_outputs += run_onnx_graph(path, feeds[path.stem], ctx.threads)
        if not np.isfinite(max_output_difference(half_outputs, float_outputs, exact=False)):
            where = _first_non_finite_node([ctx.out / path.name for path in models], feeds, ctx.threads)
            raise ParityError(
                "fp16: an output is no longer finite, or its shape has changed"
                f"{f'; the first node with such a value is {where}' if where else ''}. Add the nodes that"
                " compute it to keep_fp32, or remove this step.",
                code="non-finite-outputs",
            )
        comparison = OutputComparison(read_batch_axes(src.path))
        for call in zip(inputs, half_outputs, float_outputs, strict=True):
            comparison.add(*call)
        comparison.record(ctx)
        if max_output_difference(half_outputs, float_outputs, exact=False) > _RANDOM and _is_random(
            models, feeds, ctx
        ):
            ctx.warn(
                "random-outputs",
                "The float32 graph returns different outputs in each call, so the float16 error cannot be"
                " measured. Remove its random nodes, or score outputs that do not depend on them.",
            )
        else:
            for name, difference in comparison.exceeding(_WARN_DIFFERENCE, judge_classes=False):
                ctx.warn(
                    "outputs-changed",
                    f"Output '{name}' differs from the float32 graph by {difference}. float16 loses "
                    "precision below"
                    " 6e-5: add the nodes that compute such values to keep_fp32.",
                )
        count = sum(len(model.graph.node) for model in models.values())
        ctx.details.update(dtype="fp16", kept_float32=num_float32, nodes=count)


def _first_non_finite_node(
    paths: Iterable[Path], feeds: Mapping[str, Any], threads: int | None
) -> str | None:
    """Return the first node that returns NaN or infinity for finite inputs, on any of the samples."""
    from onnx import TensorProto

    from smelt.export.graph_files import read_graph
    from smelt.export.onnx_models.graph_samples import cast_feeds
    from smelt.export.parity.operator_checks import open_with_outputs
    from smelt.export.value_types import values_of_type
    from smelt.runtimes.graph_walk import node_label

    for path in paths:
        model = read_graph(path)
        floats = values_of_type(model) | values_of_type(model, TensorProto.FLOAT16)
        names = [name for node in model.graph.node for name in node.output if name in floats]
        session = open_with_outputs(model, path.parent, path.stem, names, threads, optimized=False)
        input_types = {item.name: item.type for item in session.get_inputs()}
        outputs = [output.name for output in session.get_outputs()]
        for call in feeds[path.stem]:
            values = (
                dict(zip(outputs, session.run(outputs, cast_feeds(call, input_types)), strict=True)) | call
            )
            floating = {name: value for name, value in values.items() if value.dtype.kind == "f"}
            non_finite = {name for name, value in floating.items() if not np.isfinite(value).all()}
            for node in model.graph.node:
                if non_finite & {*node.output} and not non_finite & {*node.input}:
                    return node_label(node)
    return None


def _is_random(models: Iterable[Path], feeds: Mapping[str, Any], ctx: Context) -> bool:
    """Return whether the float32 graphs give different outputs in a second call with the same samples."""
    from smelt.export.onnx_models.graph_samples import max_output_difference, run_onnx_graph

    for path in models:
        repeated_outputs = run_onnx_graph(path, feeds[path.stem] * 2, ctx.threads)
        half = len(repeated_outputs) // 2
        if max_output_difference(repeated_outputs[half:], repeated_outputs[:half], exact=False) > _RANDOM:
            return True
    return False


def float32_nodes(model: Any, keep: Collection[str] = ()) -> set[str]:
    """Return the nodes that remain float32 regardless of their values, by the name of their first output.

    Args:
        model: as `normalize_graph` returns it.
        keep: operators, and names of nodes, that remain float32 in addition.
    """
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST

    from smelt.export.value_types import node_key, node_types
    from smelt.runtimes.graph_walk import all_nodes, opset_versions

    always, opsets = {*DEFAULT_OP_BLOCK_LIST, *_FP32_OPS, *keep}, opset_versions(model)
    nodes = list(all_nodes(model.graph.node))
    node_keys = {
        node_key(node)
        for node in nodes
        if always & {node.op_type, node.name} or node_types(node, opsets) is None
    }
    return node_keys | _crashing_transposes(nodes)


def _expand_kept(models: Iterable[Any], keep: Collection[str]) -> list[str]:
    """Return the operators in `keep`, and the names of the nodes that its patterns match.

    Raises:
        InputError: one is neither an operator nor matches a node (`unknown-node`).
    """
    from onnx import defs

    from smelt.runtimes.graph_walk import all_nodes

    nodes = [node for model in models for node in all_nodes(model.graph.node)]
    operators = {schema.name for schema in defs.get_all_schemas()} | {node.op_type for node in nodes}
    names = [node.name for node in nodes if node.name]
    patterns = [pattern for pattern in keep if pattern not in operators]
    return [*(set(keep) & operators), *match_nodes(patterns, names, "keep_fp32")]


def _crashing_transposes(nodes: list[Any]) -> set[str]:
    """Return the Transposes that would crash ONNX Runtime on the CPU if they were float16.

    It casts matrix multiplications that it cannot compute in float16, and then reads the shape of a matrix
    without one if a batch of three dimensions or more is transposed before the multiplication (onnxruntime
    1.31, MatmulTransposeFusion). If the Transpose is float32, our Cast is between the two.
    """
    multiplied = {name for node in nodes if node.op_type == "MatMul" for name in node.input}
    transposes = set()
    for node in nodes:
        if node.op_type == "Transpose" and multiplied & set(node.output):
            order = next((list(a.ints) for a in node.attribute if a.name == "perm"), [])
            if len(order) != 2 and order[:1] != [0]:
                transposes.add(node.output[0])
    return transposes


def _overflowing_nodes(model: Any, name: str, feeds: list[Any], ctx: Context) -> set[str]:
    """Return the first outputs of the nodes with inputs, outputs or sums near or above float16's range."""
    from onnx.external_data_helper import load_external_data_for_model

    from smelt.export.graph_files import write_graph
    from smelt.export.half_graphs import ValueRanges, open_with_measurements, weight_magnitudes
    from smelt.export.onnx_models.graph_samples import cast_feeds
    from smelt.export.value_types import node_key
    from smelt.runtimes.graph_walk import all_nodes, subgraphs

    with TemporaryDirectory(dir=ctx.out.parent, prefix=".fp16-") as folder:
        write_graph(model, Path(folder, name))
        load_external_data_for_model(model, folder)  # weights that did not fit into the file were moved out
        session = open_with_measurements(model, Path(folder), Path(name).stem, ctx.threads)
        input_types = {item.name: item.type for item in session.get_inputs()}
        outputs = [output.name for output in session.get_outputs()]
        ranges = ValueRanges(weight_magnitudes(model), {})
        for inputs in feeds:
            output_values = session.run(outputs, cast_feeds(inputs, input_types))
            ranges.update(dict(zip(outputs, output_values, strict=True)))
    nodes = [node for node in all_nodes(model.graph.node) if not subgraphs(node)]
    overflow_sizes = {node_key(node): max(sizes) for node in nodes if (sizes := ranges.overflows(node))}
    if overflow_sizes:
        calls = {node_key(node): node.name or node_key(node) for node in nodes}
        worst = sorted(overflow_sizes, key=lambda name: -overflow_sizes[name])
        node_texts = ", ".join(
            f"{calls[name]} ({overflow_sizes[name]:,.0f})" for name in worst[:_MAX_NAMED_NODES]
        )
        more_text = f" and {len(worst) - _MAX_NAMED_NODES} more" if len(worst) > _MAX_NAMED_NODES else ""
        ctx.warn(
            "kept-float32",
            f"{len(overflow_sizes)} node{'s remain' if len(overflow_sizes) > 1 else ' remains'} "
            "float32, because their values"
            f" are close to or above float16's maximum (65,504): {node_texts}{more_text}.",
        )
    return set(overflow_sizes)
