"""Check an export completely: constants, operators, exact computation, and the graphs as deployed.

If an output differs with dequantized weights, the first layer that differs from torch is located. Nodes are
matched with layers by the names of their constants; the graph is run with their outputs exposed, on the
inputs on which it differed.

Shapes: B = batch, L = source length or prompt, S = new tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from smelt.core.errors import MissingDependencyError, ParityError
from smelt.export.graph_files import read_graph
from smelt.export.graphs.attention import GraphSpec
from smelt.export.parity.operator_checks import (
    GraphCall,
    TensorsByName,
    check_operators,
    open_with_outputs,
    run_graph_calls,
    session_shape,
)
from smelt.export.parity.references import (
    HALF_SUFFIX,
    LOGITS_TOLERANCES,
    ExactReference,
    TorchReference,
    check_constants,
    check_output,
    logits_for,
    make_dequantized_copy,
    round_weights_,
    run_exact,
)
from smelt.export.parity.single_texts import SingleTexts
from smelt.generation.backend import Batch
from smelt.quantization.layers import QuantizedLinear
from smelt.quantization.scheme import GRAPH_TARGETS
from smelt.runtimes.device import cuda_device_count
from smelt.runtimes.fixed_shapes import FixedShape, fixed_feeds
from smelt.runtimes.images import PIXEL_VALUES, ImageBatch
from smelt.runtimes.onnx_session import open_onnx_session
from smelt.runtimes.single_call_runners import ArrayBatch


class LayerLocation(NamedTuple):
    """A layer of the model, and the graph's node that computes its output."""

    layer: str
    node: str


def locate_first_mismatch(
    folder: Path, graph: GraphSpec, model: Any, reference: TorchReference
) -> LayerLocation | None:
    """Return the first layer of a graph whose output differs; None if none is found.

    Args:
        folder: with the graphs, in float32.
        graph: the one that differs.
        model: the parent.
        reference: the batch and tokens on which it differs.
    """
    name = graph.name
    graph_model = read_graph(folder / f"{name}.onnx", values=False)
    layer_nodes = _layer_outputs_in_graph(graph_model, graph.module)
    try:
        session = open_with_outputs(graph_model, folder, name, [value for _, value in layer_nodes.values()])
        reference = _first_fixed_call(reference, session_shape(session))
        expected = _layer_outputs(
            model, reference, {id(graph.module.get_submodule(p)): p for p in layer_nodes}
        )
        for call, actual_outputs in run_graph_calls(session, folder, name, reference):
            for path, expected_output in expected.items():
                node, value = layer_nodes[path]
                if value in actual_outputs and _differs(expected_output, actual_outputs[value], call):
                    return LayerLocation(path, node)
    except Exception:  # the graph with exposed values cannot be run; the layer is not reported
        return None
    return None


def _first_fixed_call(reference: TorchReference, shape: FixedShape) -> TorchReference:
    """Return the samples of the first call of a graph with fixed shapes; all of them if it has none."""
    if not shape:
        return reference
    batch = reference.batch
    if isinstance(batch, ArrayBatch):
        return replace(reference, batch=ArrayBatch(fixed_feeds(batch.feeds, shape)[0]))
    if isinstance(batch, ImageBatch):
        return replace(reference, batch=ImageBatch(fixed_feeds(batch.feeds, shape)[0][PIXEL_VALUES]))
    names = ("input_ids", "attention_mask", "token_type_ids")
    arrays = {name: getattr(batch, name) for name in names if getattr(batch, name) is not None}
    return replace(reference, batch=Batch(**fixed_feeds(arrays, shape)[0]))


def _layer_outputs_in_graph(model: Any, module: nn.Module) -> dict[str, tuple[str, str]]:
    """Return for each layer (norm or linear) the names of its last node and of that node's output.

    A constant with several readers identifies no layer: optimizers merge equal ones, such as norms' ones.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    readers = Counter(name for node in model.graph.node for name in node.input)
    layers = {name for name, layer in module.named_modules() if _is_layer(layer)}
    layer_outputs: dict[str, tuple[str, str]] = {}
    constant_sources: dict[str, list[str]] = {name: [name] for name in constants}  # the constants of a value
    for node in model.graph.node:
        input_names = [name for name in node.input if name]
        sources = [source for name in input_names for source in constant_sources.get(name, ())]
        if input_names and all(name in constant_sources for name in input_names):
            constant_sources.update(dict.fromkeys(node.output, sources))
            continue
        for source in sources:
            path = _owning_layer(source, layers)
            if path is not None and readers[source] == 1:
                layer_outputs[path] = (node.name, node.output[0])
    return layer_outputs


def _owning_layer(constant: str, layers: set[str]) -> str | None:
    parts = constant.split(".")
    return next((path for i in range(len(parts), 0, -1) if (path := ".".join(parts[:i])) in layers), None)


def _is_layer(module: nn.Module) -> bool:
    if isinstance(module, QuantizedLinear | nn.Linear):
        return True
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 1  # a norm


def _layer_outputs(model: Any, reference: TorchReference, wanted: dict[int, str]) -> TensorsByName:
    """Return the outputs of the modules in `wanted` (by identity), in the order of torch's calls.

    Outputs [B L, K], as in OPT's feed-forward blocks, are returned as [B, L, K].
    """
    outputs: TensorsByName = {}
    texts = reference.logits.shape[-2]

    def keep(path: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if path not in outputs:  # the first call covers all texts
                flat = output.dim() == 2 and len(output) > texts
                unflattened = output.unflatten(0, (texts, -1)) if flat else output
                outputs[path] = unflattened.detach().numpy()

        return hook

    hooks = [m.register_forward_hook(keep(wanted[id(m)])) for m in model.modules() if id(m) in wanted]
    try:
        run_exact(model, reference)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def _differs(full_output: Any, got: Any, call: GraphCall) -> bool:
    expected = full_output[:, call.positions] if full_output.ndim == 3 else full_output
    token_selector = call.token_mask if full_output.ndim == 3 and call.token_mask is not None else slice(None)
    real_tokens = expected[token_selector]
    if got.shape == real_tokens.shape:  # without padding
        expected = real_tokens
    elif expected.size == got.size:
        expected, got = real_tokens, got.reshape(expected.shape)[token_selector]
    else:  # other tokens were gathered, or it is of another part of the computation
        return bool(got.ndim == 2 and expected.ndim == 3 and got.shape[-1] == expected.shape[-1])
    std = float(np.std(expected, dtype=np.float64)) or 1.0
    largest = LOGITS_TOLERANCES["fp32"].max_difference or 0.0
    return bool(np.abs(expected - got).max(initial=0.0) > largest * std)


DifferencesByGraph = dict[str, dict[str, float]]


@dataclass(frozen=True)
class ExportedModel:
    """The exported `graphs` in `folder`, made from the torch model `model`.

    tolerance: a key of `LOGITS_TOLERANCES`, the precision of the files as deployed. target: of the export.
    dtype: compute precision of the runtime; with OpenVINO's bf16 the files are float32, which tolerance does
    not include. fp32_modules: for files in fp16 and bf16, by graph the modules that remain float32.
    """

    folder: Path
    graphs: list[GraphSpec]
    model: Any
    tolerance: str
    target: str
    threads: int | None = None
    dtype: str = "fp32"
    fp32_modules: Mapping[str, Collection[str]] = field(default_factory=dict)

    @property
    def file_dtype(self) -> str:
        """The precision of the files."""
        return "fp32" if self.target == "openvino" else self.dtype

    @property
    def is_half_precision(self) -> bool:
        """Whether the files are fp16 or bf16."""
        return self.file_dtype in ("fp16", "bf16")

    @property
    def output_name(self) -> str:
        """The output of the last graph: logits, or sentence vectors."""
        return self.graphs[-1].output_names[0]


def check_exported_graphs(subject: ExportedModel, reference: TorchReference) -> dict[str, Any]:
    """Compare graphs with their parent in every way; the parent's weights may be changed by that.

    Constants are compared bit for bit, each quantized operator with its layer on identical inputs, then the
    graphs with dequantized weights with torch, at the tolerance of fp32, and finally the graphs as deployed.

    Returns:
        For each graph the differences as deployed (largest, mean, agreement); under `exact_differences` those
        with dequantized weights, under `constants` and `operators` how many were compared.

    Raises:
        ParityError: graph, output and, if known, node and layer.
    """
    details: dict[str, Any] = {}
    for graph in subject.graphs:
        path = subject.folder / f"{graph.name}.onnx"
        model = read_graph(path, values=False)
        counts = {
            "constants": check_constants(graph.name, model, graph.module, subject.folder),
            "operators": check_operators(graph.name, model, graph.module, path, subject.threads),
        }
        details[graph.name] = counts
    if subject.is_half_precision:
        for graph in subject.graphs:
            _require_opens(subject.folder / f"{graph.name}.onnx", subject.target)
    exact_differences = _check_exactly(subject, reference)
    is_exact = subject.tolerance == subject.dtype == "fp32"
    deployed_differences = exact_differences if is_exact else _check_as_deployed(subject, reference)
    for name, counts in details.items():
        inner = {statistic: exact_differences[name][statistic] for statistic in ("largest", "mean")}
        details[name] = {**deployed_differences[name], "exact": inner, **counts}
    return details


def _check_exactly(subject: ExportedModel, reference: TorchReference) -> DifferencesByGraph:
    """Compare the graphs, on their constants in float32, with the dequantized parent, padding included."""
    reference = replace(reference, by_text=False)
    exact_reference = run_exact(subject.model, reference)
    _require_unchanged(subject, reference, exact_reference)
    if subject.is_half_precision:
        round_weights_(subject.model, subject.file_dtype, _fp32_weights(subject))
        exact_reference = run_exact(subject.model, reference)
    kind = {"fp16": "rounded", "bf16": "rounded-bf16"}.get(subject.file_dtype, "fp32")
    with _float32_copy(subject) as folder:
        try:
            with _open_runner(subject, folder, "fp32") as runner:
                return _compare(runner, subject.output_name, reference, exact_reference, kind)
        except ParityError as error:
            differing = next((g for g in subject.graphs if error.file == f"{g.name}.onnx"), None)
            mismatch = differing and locate_first_mismatch(folder, differing, subject.model, reference)
            mismatch_text = (
                f" The first layer that differs is {mismatch.layer} (node '{mismatch.node}')."
                if mismatch
                else ""
            )
            raise ParityError(f"{error}{mismatch_text}", code=error.code, file=error.file) from error


def _fp32_weights(subject: ExportedModel) -> list[Tensor]:
    """Return the weights that are float32 in files of fp16 or bf16."""
    module_parameters = [
        (g.module, name) for g in subject.graphs for name in subject.fp32_modules.get(g.name, ())
    ]
    return [
        w for module, name in module_parameters for w in module.get_submodule(name).parameters(recurse=False)
    ]


def _require_unchanged(subject: ExportedModel, reference: TorchReference, exact: ExactReference) -> None:
    """Require that preparing the model for the export did not change its outputs.

    Graph and model share such a change, so comparing the two would not find it.

    Raises:
        ParityError: the outputs changed.
    """
    if reference.exact_states is not None:
        try:
            check_output(
                subject.graphs[-1].name, subject.output_name, reference.exact_states, exact.logits, "fp32"
            )
        except ParityError as error:
            raise ParityError(
                f"{error} Preparing the model for export changed its outputs.",
                code="model-changed",
                file=error.file,
            ) from error


@contextmanager
def _float32_copy(subject: ExportedModel) -> Iterator[Path]:
    if subject.tolerance == "fp32":
        yield subject.folder
        return
    with make_dequantized_copy(
        subject.folder, [g.name for g in subject.graphs], subject.is_half_precision
    ) as folder:
        yield folder


def _compare(
    runner: Any, result: str, reference: TorchReference, exact: ExactReference, kind: str
) -> DifferencesByGraph:
    """Compare all outputs with `exact`. result: the last output."""
    differences: DifferencesByGraph = {}
    batch = reference.batch
    if runner.graphs.independent:
        return _compare_independent(runner, exact.logits, logits_for(runner, reference), kind)
    if exact.encoder_states is not None:
        name, is_token = "encoder_model", batch.attention_mask == 1
        encoder = SingleTexts(runner) if reference.by_text else runner
        encoder_outputs = encoder.encoder_outputs(batch)
        states = encoder_outputs["last_hidden_state"]
        differences[name] = check_output(
            name, "last_hidden_state", exact.encoder_states[is_token], states[is_token], kind
        )
        del differences[name]["agreement"]
        for output, expected in exact.cross_caches.items():
            keys = [
                np.moveaxis(t, 1, 2)[is_token] for t in (expected, encoder_outputs[output])
            ]  # [tokens, H, d]
            check_output(name, output, keys[0], keys[1], kind)
    name = "model" if exact.encoder_states is None else "decoder_with_past_model"
    if exact.all_logits is not None:
        logits_twice = np.concatenate([exact.all_logits, exact.all_logits[-1:]])
        check_output(name, "logits", logits_twice, _logits_in_two_calls(runner, batch.input_ids[-1:]), kind)
    outputs = logits_for(runner, reference)
    if isinstance(batch, ArrayBatch):
        return {name: _compare_arrays(runner, exact.logits, outputs, kind)}
    differences[name] = check_output(name, result, exact.logits, outputs, kind)
    if result != "logits":  # the argmax of a vector is not a class
        del differences[name]["agreement"]
    return differences


def _compare_independent(runner: Any, expected: Any, outputs: Any, kind: str) -> DifferencesByGraph:
    """Compare the outputs of graphs that are called alone, concatenated in the order of the calls."""
    graphs = runner.graphs.call_order
    parts = zip(np.split(expected, len(graphs)), np.split(outputs, len(graphs)), strict=True)
    differences: DifferencesByGraph = {}
    for graph, (expected_part, part) in zip(graphs, parts, strict=True):
        [output] = graph.outputs
        differences[graph.name] = check_output(graph.name, output, expected_part, part, kind)
        del differences[graph.name]["agreement"]
    return differences


def _compare_arrays(runner: Any, expected: Any, outputs: Any, kind: str) -> dict[str, float]:
    """Compare each output of a graph of arrays, [B, N] of all; return the largest differences."""
    sizes = [math.prod(int(size) for size in value.shape[1:]) for value in runner.signature.outputs]
    ends = np.cumsum(sizes)
    differences = [
        check_output("model", value.name, expected[:, end - size : end], outputs[:, end - size : end], kind)
        for value, size, end in zip(runner.signature.outputs, sizes, ends, strict=True)
    ]
    return {name: max(each[name] for each in differences) for name in ("largest", "mean")}


def _logits_in_two_calls(runner: Any, ids: Any) -> Any:
    """Return all logits [S, V] of one prompt [1, S], computed in two parts; then its last token's again."""
    state = runner.start(1)
    half = ids.shape[1] // 2
    parts = [ids[:, :half], ids[:, half:]]
    logits_parts = [
        runner.extend(state, np.ascontiguousarray(p), np.ones_like(p))[0] for p in parts if p.size
    ]
    logits_parts.append(runner.extend(runner.start(1), ids, np.ones_like(ids), last=1)[0])
    return np.concatenate(logits_parts)


def _check_as_deployed(subject: ExportedModel, reference: TorchReference) -> DifferencesByGraph:
    exact_reference = ExactReference(reference.logits, reference.encoder_states)
    dtype = "fp32" if subject.is_half_precision else subject.dtype
    with _rounding_copy(subject) as folder, _open_runner(subject, folder, dtype) as runner:
        of_files = f"{subject.tolerance}{HALF_SUFFIX if subject.is_half_precision else ''}"
        kinds = (subject.tolerance, of_files, subject.dtype)
        tolerance_kinds = [kind for kind in kinds if kind in LOGITS_TOLERANCES]
        kind = max(tolerance_kinds, key=lambda kind: LOGITS_TOLERANCES[kind].mean_difference)
        return _compare(runner, subject.output_name, reference, exact_reference, kind)


@contextmanager
def _rounding_copy(subject: ExportedModel) -> Iterator[Path]:
    """Yield the folder of the graphs; for fp16 and bf16, graphs for a CPU with the same rounding."""
    if not subject.is_half_precision:
        yield subject.folder
        return
    names = [g.name for g in subject.graphs]
    with make_dequantized_copy(subject.folder, names, widen=True, rounding=True) as folder:
        yield folder


def _require_opens(path: Path, target: str) -> None:
    """Open a file of fp16 or bf16, which is compared by copies, in its target's runtime.

    ONNX Runtime opens it for all other targets: it rejects types that an operator does not support. A kernel
    that is missing on this machine does not matter for a graph for another device.

    Raises:
        ParityError: `unopened-graph`.
    """
    try:
        if target == "openvino":
            import openvino

            openvino.Core().compile_model(str(path), "CPU")
        else:
            open_onnx_session(
                path, 1, "cuda" if target == "ort-cuda" and cuda_device_count() else "cpu", optimized=False
            )
    except Exception as error:  # errors of runtimes share no other base class
        kind = type(error.__cause__ or error).__name__  # ONNX Runtime's classes differ only by name
        if kind != "NotImplemented" or target == "ort-cpu":
            raise ParityError(
                f"{path.name}: {target} cannot open this graph: {error}",
                code="unopened-graph",
                file=path.name,
            ) from error


@contextmanager
def _open_runner(subject: ExportedModel, folder: Path, dtype: str) -> Iterator[Any]:
    """Yield a runner for the graphs in `folder`, which compute in `dtype`.

    Raises:
        MissingDependencyError: the target's runtime is not installed.
        ParityError: it cannot open or run them.
    """
    from smelt.runtimes.registry import open_folder

    try:
        # an engine rounds differently and takes minutes to build: here the graph is checked, not TensorRT
        device = "cpu" if subject.target in GRAPH_TARGETS else "auto"
        with open_folder(folder, "onnx", subject.target, subject.threads, device, dtype) as runner:
            yield runner
    except (ParityError, MissingDependencyError):
        raise
    except Exception as error:  # errors of runtimes share no other base class
        names = " and ".join(graph.name for graph in subject.graphs)
        runtime = "OpenVINO" if subject.target == "openvino" else "ONNX Runtime"
        raise ParityError(
            f"{names}: {runtime} cannot run the exported graphs: {error}", code="graph-failed"
        ) from error
