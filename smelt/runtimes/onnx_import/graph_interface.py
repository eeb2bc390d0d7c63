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
from smelt.runtimes.onnx_import.graph_files import GraphFileError
from smelt.runtimes.onnx_import.import_graph import GRAPH_FILE, write_with_external_data
from smelt.runtimes.onnx_import.signature import GraphSignature
from smelt.runtimes.onnx_import.trial_run import is_close, read_feeds, trial_limits, write_feeds

InputShapes = Mapping[str, Sequence[int | str]]
"""New shapes of inputs: sizes, and names of free axes."""
ZipMaps = dict[str, list[str | int]]
_ML_DOMAIN = "ai.onnx.ml"


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
    return classes


def set_input_shapes(model: Any, shapes: InputShapes) -> None:
    """Give inputs of an onnx.ModelProto other shapes, in place; those of all other values are inferred anew.

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
    original: Path, adapted: Path, signature: GraphSignature, feeds: dict[str, NDArray[Any]]
) -> None:
    """Require that a graph with new shapes computes what the original computes, also for twice the samples.

    Args:
        original: the graph before, which takes `feeds`.
        adapted: the graph with new shapes.
        signature: of the adapted graph, with batch axes.
        feeds: inputs of the original.

    Raises:
        InputError: `wrong-shape`: it fails, crashes, or its outputs differ.
    """
    axes = {value.name: value.axis for value in (*signature.outputs, *signature.inputs)}
    is_free = signature.fixed_batch_size is None
    with temporary_workspace() as folder:
        arguments = [str(original), str(adapted), *write_feeds(Path(folder), feeds)]
        arguments.append(json.dumps([is_free, axes]))
        try:
            problem = run_isolated(f"{__name__}:compare_graphs", arguments, trial_limits(adapted, feeds))
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

    arguments: both files, that of the samples, the names of the inputs, whether the batch size is free, and
    the batch axes by name.
    """
    from smelt.runtimes.onnx_session import open_onnx_session

    feeds, (is_free, axes) = read_feeds(*arguments[2:4]), json.loads(arguments[4])
    original, adapted = (open_onnx_session(Path(file), threads=1) for file in arguments[:2])
    names = [output.name for output in adapted.get_outputs() if output.type.startswith("tensor")]
    expected = original.run(names, feeds)
    try:
        outputs = [adapted.run(names, feeds)]
        if is_free:
            twice = {n: v if axes[n] is None else np.concatenate([v, v], axes[n]) for n, v in feeds.items()}
            outputs.append(adapted.run(names, twice))
    except MemoryError:
        raise
    except Exception as error:  # ONNX Runtime's exceptions have no other common base
        return " ".join(str(error).split())[:400]
    for name, value, *results in zip(names, expected, *outputs, strict=True):
        copies = [value] if axes[name] is None else [value, np.concatenate([value, value], axes[name])]
        for result, copy in zip(results, copies, strict=False):
            if not is_close(result, copy):
                return f"the output '{name}' differs{' for twice as many samples' * (copy is not value)}"
    return None
