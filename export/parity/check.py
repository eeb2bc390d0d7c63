"""The whole question: constants, operators, the exact computation, and the graphs as they are deployed."""

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
from smelt.export.graphs.graph import Graph
from smelt.export.parity.compare import TOLERANCES, check_parity
from smelt.export.parity.constants import check_constants
from smelt.export.parity.operators import check_operators
from smelt.export.parity.reference import Exact, Reference, exact_of, logits_for, round_weights_
from smelt.export.parity.twin import exact_twin
from smelt.export.parity.where import first_difference
from smelt.runtime.backends.device import cuda_devices
from smelt.runtime.backends.onnx_session import open_session
from smelt.runtime.schemes.scheme import GRAPHS_OF

Figures = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Subject:
    """What is asked about: the `graphs` that lie in `folder`, made from the torch model `model`.

    kind: a word of `compare.TOLERANCES`, how exactly the files compute as deployed. target: of the export.
    dtype: what the runtime computes in; with OpenVINO's bf16 the files are float32, and kind does not know
    of it. float32: of files in fp16 and bf16, by graph the modules that stay float32.
    """

    folder: Path
    graphs: list[Graph]
    model: Any
    kind: str
    target: str
    threads: int | None = None
    dtype: str = "fp32"
    float32: Mapping[str, Collection[str]] = field(default_factory=dict)

    @property
    def half(self) -> bool:
        """Whether the files are fp16 or bf16."""
        return self.kind in ("fp16", "bf16")

    @property
    def result(self) -> str:
        """What the last graph gives: logits, or the vectors of texts."""
        return self.graphs[-1].output_names[0]


def check_graphs(subject: Subject, reference: Reference) -> dict[str, Any]:
    """Compare graphs with their parent in every way; the parent's weights may be changed by that.

    Constants are compared bit for bit, each quantized operator with its layer on identical inputs, then what
    the graphs compute with dequantized weights with what torch does, at the tolerance of fp32, and at last
    what they compute as deployed.

    Returns:
        For each graph the differences as deployed (largest, mean, agreement); under `exact` those with
        dequantized weights, under `constants` and `operators` how many were compared.

    Raises:
        ParityError: graph, output and, where it is known, node and layer.
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
    if subject.half:
        for graph in subject.graphs:
            _require_opens(subject.folder / f"{graph.name}.onnx", subject.target)
    exact = _check_exactly(subject, reference)
    is_exact = subject.kind == subject.dtype == "fp32"
    deployed = exact if is_exact else _check_as_deployed(subject, reference)
    for name, counts in details.items():
        inner = {word: exact[name][word] for word in ("largest", "mean")}
        details[name] = {**deployed[name], "exact": inner, **counts}
    return details


def _check_exactly(subject: Subject, reference: Reference) -> Figures:
    """Compare what the graphs compute on their own constants in float32 with the dequantized parent."""
    exact = exact_of(subject.model, reference)
    _require_unchanged(subject, reference, exact)
    if subject.half:
        round_weights_(subject.model, subject.kind, _kept(subject))
        exact = exact_of(subject.model, reference)
    kind = {"fp16": "rounded", "bf16": "rounded-bf16"}.get(subject.kind, "fp32")
    with _in_float32(subject) as folder:
        try:
            with _opened(subject, folder, "fp32") as runner:
                return _compare(runner, subject.result, reference, exact, kind)
        except ParityError as error:
            differing = next((g for g in subject.graphs if error.file == f"{g.name}.onnx"), None)
            place = differing and first_difference(folder, differing, subject.model, reference)
            where = f" The first layer that differs is {place.layer} (node '{place.node}')." if place else ""
            raise ParityError(f"{error}{where}", code=error.code, file=error.file) from error


def _kept(subject: Subject) -> list[Tensor]:
    """Return the weights that are float32 in files of fp16 or bf16."""
    named = [(g.module, name) for g in subject.graphs for name in subject.float32.get(g.name, ())]
    return [w for module, name in named for w in module.get_submodule(name).parameters(recurse=False)]


def _require_unchanged(subject: Subject, reference: Reference, exact: Exact) -> None:
    """Require that the prepared model still computes what it computed before it was prepared.

    What preparing has changed is the same in the graph and in the model, so that the two agree on it.

    Raises:
        ParityError: it computes something else.
    """
    if reference.exact is not None:
        try:
            check_parity(subject.graphs[-1].name, subject.result, reference.exact, exact.logits, "fp32")
        except ParityError as error:
            raise ParityError(
                f"{error} Preparing the export changed the model itself.",
                code="model-changed",
                file=error.file,
            ) from error


@contextmanager
def _in_float32(subject: Subject) -> Iterator[Path]:
    if subject.kind == "fp32":
        yield subject.folder
        return
    with exact_twin(subject.folder, [g.name for g in subject.graphs], subject.half) as folder:
        yield folder


def _compare(runner: Any, result: str, reference: Reference, exact: Exact, kind: str) -> Figures:
    """Compare all outputs; `exact` is what they should be. result: the output that comes last."""
    found: Figures = {}
    batch = reference.batch
    if exact.hidden is not None:
        name, real = "encoder_model", batch.attention_mask == 1
        got = runner.encoder_outputs(batch)
        states = got["last_hidden_state"]
        found[name] = check_parity(name, "last_hidden_state", exact.hidden[real], states[real], kind)
        del found[name]["agreement"]
        for output, expected in exact.cross.items():
            keys = [np.moveaxis(t, 1, 2)[real] for t in (expected, got[output])]  # [tokens, H, d]
            check_parity(name, output, keys[0], keys[1], kind)
    name = "model" if exact.hidden is None else "decoder_with_past_model"
    if exact.whole is not None:
        whole = np.concatenate([exact.whole, exact.whole[-1:]])
        check_parity(name, "logits", whole, _in_stretches(runner, batch.input_ids[-1:]), kind)
    found[name] = check_parity(name, result, exact.logits, logits_for(runner, reference), kind)
    if result != "logits":  # the largest number of a vector is nothing that is chosen
        del found[name]["agreement"]
    return found


def _in_stretches(runner: Any, ids: Any) -> Any:
    """Return all logits [S, V] of one prompt [1, S], fed in two stretches; then its last token's again."""
    state = runner.start(1)
    half = ids.shape[1] // 2
    parts = [ids[:, :half], ids[:, half:]]
    found = [runner.extend(state, np.ascontiguousarray(p), np.ones_like(p))[0] for p in parts if p.size]
    found.append(runner.extend(runner.start(1), ids, np.ones_like(ids), last=1)[0])
    return np.concatenate(found)


def _check_as_deployed(subject: Subject, reference: Reference) -> Figures:
    exact = Exact(reference.logits, reference.hidden)
    dtype = "fp32" if subject.half else subject.dtype
    with _as_it_rounds(subject) as folder, _opened(subject, folder, dtype) as runner:
        kinds = [kind for kind in (subject.kind, subject.dtype) if kind in TOLERANCES]
        kind = max(kinds, key=lambda kind: TOLERANCES[kind].mean)
        return _compare(runner, subject.result, reference, exact, kind)


@contextmanager
def _as_it_rounds(subject: Subject) -> Iterator[Path]:
    """Give the folder of the graphs; of fp16 and bf16, graphs for a CPU that round as these do."""
    if not subject.half:
        yield subject.folder
        return
    names = [g.name for g in subject.graphs]
    with exact_twin(subject.folder, names, half=True, rounding=True) as folder:
        yield folder


def _require_opens(path: Path, target: str) -> None:
    """Open a file of fp16 or bf16, which is compared by twins, in the runtime that it is for.

    ONNX Runtime takes it for all other targets: it refuses types that an operator does not take. That this
    machine has no kernel for one says nothing of a graph that is for another device.

    Raises:
        ParityError: `unopened-graph`.
    """
    try:
        if target == "openvino":
            import openvino

            openvino.Core().compile_model(str(path), "CPU")
        else:
            open_session(
                path, 1, "cuda" if target == "ort-cuda" and cuda_devices() else "cpu", optimized=False
            )
    except Exception as error:  # the errors of runtimes share no other base
        kind = type(error.__cause__ or error).__name__  # ONNX Runtime's classes are told by name alone
        if kind != "NotImplemented" or target == "ort-cpu":
            raise ParityError(
                f"{path.name}: {target} cannot open it: {error}", code="unopened-graph", file=path.name
            ) from error


@contextmanager
def _opened(subject: Subject, folder: Path, dtype: str) -> Iterator[Any]:
    """Give a runner over the graphs in `folder`, which compute in `dtype`.

    Raises:
        MissingDependencyError: the target's runtime is not there.
        ParityError: it cannot open or run them.
    """
    from smelt.runtime.backends.open_runner import open_folder

    try:
        # an engine has roundings of its own, and is built for minutes: here the graph is asked, not TensorRT
        device = "cpu" if subject.target in GRAPHS_OF else "auto"
        with open_folder(folder, "onnx", subject.target, subject.threads, device, dtype) as runner:
            yield runner
    except (ParityError, MissingDependencyError):
        raise
    except Exception as error:  # the errors of runtimes share no other base
        names = " and ".join(graph.name for graph in subject.graphs)
        runtime = "OpenVINO" if subject.target == "openvino" else "ONNX Runtime"
        raise ParityError(
            f"{names}: {runtime} cannot run what was exported: {error}", code="graph-failed"
        ) from error
