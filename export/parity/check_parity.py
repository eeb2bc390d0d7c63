"""Check an export completely: constants, operators, exact computation, and the graphs as deployed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from smelt.core.errors import MissingDependencyError, ParityError
from smelt.export.graph_files import read_graph
from smelt.export.graphs.graph_spec import GraphSpec
from smelt.export.parity.dequantized_copy import check_constants, make_dequantized_copy
from smelt.export.parity.locate_mismatch import locate_first_mismatch
from smelt.export.parity.operator_checks import check_operators
from smelt.export.parity.torch_reference import (
    LOGITS_TOLERANCES,
    ExactReference,
    TorchReference,
    check_output,
    logits_for,
    round_weights_,
    run_exact,
)
from smelt.quantization.scheme import GRAPH_TARGETS
from smelt.runtimes.device import cuda_device_count
from smelt.runtimes.onnx_session import open_onnx_session

DifferencesByGraph = dict[str, dict[str, float]]


@dataclass(frozen=True)
class ExportedModel:
    """The exported `graphs` in `folder`, made from the torch model `model`.

    tolerance: a key of `tolerances.TOLERANCES`, the precision of the files as deployed. target: of the
    export. dtype: compute precision of the runtime; with OpenVINO's bf16 the files are float32, which
    tolerance does not include. fp32_modules: for files in fp16 and bf16, by graph the modules that remain
    float32.
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
    def is_half_precision(self) -> bool:
        """Whether the files are fp16 or bf16."""
        return self.tolerance in ("fp16", "bf16")

    @property
    def output_name(self) -> str:
        """The output of the last graph: logits, or sentence vectors."""
        return self.graphs[-1].output_names[0]


def check_exported_graphs(subject: ExportedModel, reference: TorchReference) -> dict[str, Any]:
    """Compare graphs with their parent in every way; the parent's weights may be changed by that.

    Constants are compared bit for bit, each quantized operator with its layer on identical inputs, then the
    graphs with dequantized weights with torch, at the tolerance of fp32, and finally the graphs as deployed.

    Returns:
        For each graph the differences as deployed (largest, mean, agreement); under `exact` those with
        dequantized weights, under `constants` and `operators` how many were compared.

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
    exact = _check_exactly(subject, reference)
    is_exact = subject.tolerance == subject.dtype == "fp32"
    deployed = exact if is_exact else _check_as_deployed(subject, reference)
    for name, counts in details.items():
        inner = {word: exact[name][word] for word in ("largest", "mean")}
        details[name] = {**deployed[name], "exact": inner, **counts}
    return details


def _check_exactly(subject: ExportedModel, reference: TorchReference) -> DifferencesByGraph:
    """Compare the graphs, on their own constants in float32, with the dequantized parent."""
    exact = run_exact(subject.model, reference)
    _require_unchanged(subject, reference, exact)
    if subject.is_half_precision:
        round_weights_(subject.model, subject.tolerance, _fp32_weights(subject))
        exact = run_exact(subject.model, reference)
    kind = {"fp16": "rounded", "bf16": "rounded-bf16"}.get(subject.tolerance, "fp32")
    with _float32_copy(subject) as folder:
        try:
            with _open_runner(subject, folder, "fp32") as runner:
                return _compare(runner, subject.output_name, reference, exact, kind)
        except ParityError as error:
            differing = next((g for g in subject.graphs if error.file == f"{g.name}.onnx"), None)
            place = differing and locate_first_mismatch(folder, differing, subject.model, reference)
            where = f" The first layer that differs is {place.layer} (node '{place.node}')." if place else ""
            raise ParityError(f"{error}{where}", code=error.code, file=error.file) from error


def _fp32_weights(subject: ExportedModel) -> list[Tensor]:
    """Return the weights that are float32 in files of fp16 or bf16."""
    named = [(g.module, name) for g in subject.graphs for name in subject.fp32_modules.get(g.name, ())]
    return [w for module, name in named for w in module.get_submodule(name).parameters(recurse=False)]


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
    found: DifferencesByGraph = {}
    batch = reference.batch
    if exact.encoder_states is not None:
        name, real = "encoder_model", batch.attention_mask == 1
        got = runner.encoder_outputs(batch)
        states = got["last_hidden_state"]
        found[name] = check_output(name, "last_hidden_state", exact.encoder_states[real], states[real], kind)
        del found[name]["agreement"]
        for output, expected in exact.cross_caches.items():
            keys = [np.moveaxis(t, 1, 2)[real] for t in (expected, got[output])]  # [tokens, H, d]
            check_output(name, output, keys[0], keys[1], kind)
    name = "model" if exact.encoder_states is None else "decoder_with_past_model"
    if exact.all_logits is not None:
        whole = np.concatenate([exact.all_logits, exact.all_logits[-1:]])
        check_output(name, "logits", whole, _logits_in_two_calls(runner, batch.input_ids[-1:]), kind)
    found[name] = check_output(name, result, exact.logits, logits_for(runner, reference), kind)
    if result != "logits":  # the argmax of a vector is not a class
        del found[name]["agreement"]
    return found


def _logits_in_two_calls(runner: Any, ids: Any) -> Any:
    """Return all logits [S, V] of one prompt [1, S], computed in two parts; then its last token's again."""
    state = runner.start(1)
    half = ids.shape[1] // 2
    parts = [ids[:, :half], ids[:, half:]]
    found = [runner.extend(state, np.ascontiguousarray(p), np.ones_like(p))[0] for p in parts if p.size]
    found.append(runner.extend(runner.start(1), ids, np.ones_like(ids), last=1)[0])
    return np.concatenate(found)


def _check_as_deployed(subject: ExportedModel, reference: TorchReference) -> DifferencesByGraph:
    exact = ExactReference(reference.logits, reference.encoder_states)
    dtype = "fp32" if subject.is_half_precision else subject.dtype
    with _rounding_copy(subject) as folder, _open_runner(subject, folder, dtype) as runner:
        kinds = [kind for kind in (subject.tolerance, subject.dtype) if kind in LOGITS_TOLERANCES]
        kind = max(kinds, key=lambda kind: LOGITS_TOLERANCES[kind].mean_difference)
        return _compare(runner, subject.output_name, reference, exact, kind)


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
