"""Change inputs and outputs of a third-party graph: arrays instead of dictionaries, other shapes.

A ZipMap of scikit-learn turns probabilities [batch, classes] into a list of dictionaries, which is no array:
its input becomes the output. New shapes of inputs free axes that an exporter fixed, or fix free ones, for
runtimes that need it; what the graph computes must stay the same, which `check_new_shapes` tests by a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError
from smelt.core.system import IsolatedProcessError, run_isolated
from smelt.core.workspaces import temporary_workspace
from smelt.runtimes.graph_walk import opset_versions
from smelt.runtimes.onnx_import.graph_files import GraphFileError
from smelt.runtimes.onnx_import.import_graph import GRAPH_FILE, write_with_external_data
from smelt.runtimes.onnx_import.signature import GraphSignature
from smelt.runtimes.onnx_import.trial_run import is_close, read_feeds, trial_limits, write_feeds

InputShapes = Mapping[str, Sequence[int | str]]
"""New shapes of inputs: sizes, and names of free axes."""
ZipMaps = dict[str, list[str | int]]
_ML_DOMAIN = "ai.onnx.ml"
_IDENTITY_OPSET = 13


def replace_zipmaps(model: Any) -> ZipMaps:
    """Let outputs of an onnx.ModelProto that ZipMap makes be its input; return their classes, by output."""
    from onnx import TensorProto, helper

    classes: ZipMaps = {}
    makers = {name: node for node in model.graph.node for name in node.output}
    for output in model.graph.output:
        node = makers.get(output.name)
        if node is None or (node.domain, node.op_type) != (_ML_DOMAIN, "ZipMap") or not node.input:
            continue
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        labels = [*attributes.get("classlabels_int64s", ()), *attributes.get("classlabels_strings", ())]
        classes[output.name] = [
            v.decode(errors="replace") if isinstance(v, bytes) else int(v) for v in labels
        ]
        del node.attribute[:]
        node.op_type, node.domain = "Identity", ""
        shape = [None, len(labels) or None]
        output.CopyFrom(helper.make_tensor_value_info(output.name, TensorProto.FLOAT, shape))
    if classes and "" not in opset_versions(model):
        model.opset_import.append(helper.make_opsetid("", _IDENTITY_OPSET))
    return classes


def set_input_shapes(model: Any, shapes: InputShapes) -> None:
    """Give inputs of an onnx.ModelProto other shapes, in place; the shapes of outputs are inferred again.

    Raises:
        GraphFileError: `unknown-input`, or `wrong-shape`: an input has another number of axes, or the shapes
            contradict each other.
    """
    inputs = {value.name: value for value in model.graph.input}
    for name, shape in shapes.items():
        if name not in inputs:
            raise GraphFileError(
                f"'{name[:80]}' in shapes is no input of the graph; inputs: {', '.join(inputs)}",
                code="unknown-input",
            )
        _set_shape(inputs[name], shape)
    _infer_output_shapes(model)


def _set_shape(value: Any, shape: Sequence[int | str]) -> None:
    tensor = value.type.tensor_type
    if tensor.HasField("shape") and len(tensor.shape.dim) != len(shape):
        raise GraphFileError(
            f"its input '{value.name}' has {len(tensor.shape.dim)} axes, but shapes has {len(shape)}",
            code="wrong-shape",
        )
    del tensor.shape.dim[:]
    for size in shape:
        tensor.shape.dim.add(**{"dim_value" if isinstance(size, int) else "dim_param": size})


def _infer_output_shapes(model: Any) -> None:
    """Set the shapes of the outputs, unknown sizes where they cannot be inferred, and forget inner ones."""
    import onnx

    del model.graph.value_info[:]
    ranks = {}
    for output in model.graph.output:
        tensor = output.type.tensor_type
        if tensor.HasField("shape"):
            ranks[output.name] = len(tensor.shape.dim)
            tensor.ClearField("shape")
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception as error:  # of C++, without a public base class
        raise GraphFileError(
            f"its operators contradict the shapes: {' '.join(str(error).split())[:300]}", code="wrong-shape"
        ) from error
    inferred_outputs = {value.name: value.type.tensor_type for value in inferred.graph.output}
    for output in model.graph.output:
        shape_of_output = inferred_outputs[output.name].shape
        if inferred_outputs[output.name].HasField("shape"):
            output.type.tensor_type.shape.CopyFrom(shape_of_output)
        else:
            for _ in range(ranks.get(output.name, 0)):
                output.type.tensor_type.shape.dim.add()


def adapt_interface(model: Any, shapes: InputShapes) -> ZipMaps:
    """Apply `replace_zipmaps`, and `set_input_shapes` if any are given, to an onnx.ModelProto in place.

    Raises:
        GraphFileError: see `set_input_shapes`.
    """
    classes = replace_zipmaps(model)
    if shapes:
        set_input_shapes(model, shapes)
    return classes


def write_adapted(source: Path, target: Path, shapes: InputShapes) -> Path:
    """Write the graph in the file `source` with the interface of `adapt_interface` as `target`."""
    import onnx

    model = onnx.ModelProto.FromString(source.read_bytes())
    adapt_interface(model, shapes)
    return write_with_external_data(model, source, target)


@contextmanager
def graph_of_arrays(file: Path, zipmaps: ZipMaps) -> Iterator[Path]:
    """Yield the graph in `file`, or where it has ZipMaps a temporary copy without them."""
    if not zipmaps:
        yield file
        return
    with temporary_workspace() as folder:
        yield write_adapted(file, Path(folder) / GRAPH_FILE, {})


def check_new_shapes(
    original: Path, adapted: Path, signature: GraphSignature, calls: Sequence[dict[str, NDArray[Any]]]
) -> None:
    """Require that a graph with new shapes computes what the original computes, also for two calls in one.

    Args:
        original: the graph before, which takes `calls`.
        adapted: the graph with new shapes.
        signature: of the adapted graph, with batch axes.
        calls: inputs of two calls of the original.

    Raises:
        InputError: `wrong-shape`: it fails, crashes, or its outputs differ.
    """
    axes = {value.name: value.axis for value in (*signature.outputs, *signature.inputs)}
    is_free = signature.fixed_batch_size is None
    with temporary_workspace() as folder:
        arguments = [str(original), str(adapted), json.dumps([is_free, axes])]
        for index, feeds in enumerate(calls):
            (Path(folder) / str(index)).mkdir()
            arguments += write_feeds(Path(folder) / str(index), feeds)
        try:
            limits = trial_limits(
                adapted, {f"{n} {i}": v for i, call in enumerate(calls) for n, v in call.items()}
            )
            problem = run_isolated(f"{__name__}:compare_graphs", arguments, limits)
        except IsolatedProcessError as error:
            problem = str(error)
    if problem is not None:
        raise InputError(
            f"{original}: with the shapes of the recipe the graph does not compute the same: {problem}."
            " Remove them, or export the graph with these axes.",
            code="wrong-shape",
        )


def compare_graphs(arguments: Sequence[str]) -> str | None:
    """Return how a graph with new shapes differs from the original; see `check_new_shapes`.

    arguments: both files, whether the batch size is free with the batch axes by name, and for each call the
    file of its samples and the names of the inputs.
    """
    from smelt.runtimes.onnx_session import open_onnx_session

    is_free, axes = json.loads(arguments[2])
    calls = [read_feeds(*arguments[begin : begin + 2]) for begin in range(3, len(arguments), 2)]
    original, adapted = (open_onnx_session(Path(file), threads=1) for file in arguments[:2])
    names = [output.name for output in adapted.get_outputs()]
    expected = [dict(zip(names, original.run(names, call), strict=True)) for call in calls]
    if is_free:
        calls.append(
            {n: v if axes[n] is None else _concatenate(calls, n, axes[n]) for n, v in calls[0].items()}
        )
        expected.append({n: _concatenate(expected, n, axes[n]) for n in names if axes[n] is not None})
    for call, outputs in zip(calls, expected, strict=True):
        try:
            results = dict(zip(names, adapted.run(names, call), strict=True))
        except MemoryError:
            raise
        except Exception as error:  # ONNX Runtime's exceptions have no other common base
            return " ".join(str(error).split())[:400]
        for name, output in outputs.items():
            if not is_close(results[name], output):
                return (
                    f"the output '{name}' differs{' for two calls in one' * (call is calls[-1] and is_free)}"
                )
    return None


def _concatenate(parts: Sequence[Mapping[str, NDArray[Any]]], name: str, axis: int) -> NDArray[Any]:
    return np.concatenate([part[name] for part in parts], axis)
