"""Validates an ONNX file for ONNX Runtime, in a separate process with resource limits.

First the file is checked: its size, format, tensors and external data, names, cycles, operators.
Only a valid file is then opened as a session, which may fold constants without limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from smelt.core.memory import available_bytes
from smelt.core.messages import Message, error_message, messages_to_json
from smelt.runtime.third_party.external_data import GraphFileError
from smelt.runtime.third_party.isolated_process import IsolatedProcessError, ProcessLimits, run_isolated
from smelt.runtime.third_party.signature import GraphSignature

# The imports alone, with room for a small graph; a hostile file gets no more.
_BASE_BYTES = 1_200_000_000
_BASE_SECONDS = 12.0
# factors of a file's bytes: as read, as a message, as a session's weights, and packed
_COPIES = 5
_SECONDS_PER_BYTE = 1 / 20e6
_LARGEST = (1 << 31) - 1  # bytes of a protobuf
_MAX_PROBLEMS = 8
_LFS_POINTER = b"version https://git-lfs"


class GraphValidation(NamedTuple):
    """The result of a validation.

    problems: why the file cannot be used, each with a code and, as its text, the end of a sentence; if there
    are any, the rest is empty.
    files: those next to it that hold weights, by their names. details: opset, nodes, parameters, producer.
    """

    problems: tuple[Message, ...] = ()
    signature: GraphSignature | None = None
    files: tuple[str, ...] = ()
    details: dict[str, Any] | None = None


def validate_graph(path: Path) -> GraphValidation:
    """Return the validation of the ONNX file `path`, opened once in a separate process."""
    try:
        said = run_isolated(__name__, [str(path)], validation_limits(path))
    except OSError as error:
        return GraphValidation((error_message("unreadable-file", f"cannot be read: {error.strerror}"),))
    except IsolatedProcessError as error:
        text = f"opening it in ONNX Runtime failed: {error}"
        return GraphValidation((error_message(error.code, text),))
    if said["problems"]:
        return GraphValidation(tuple(Message(**problem) for problem in said["problems"]))
    return GraphValidation(
        (), GraphSignature.model_validate(said["signature"]), tuple(said["files"]), said["details"]
    )


def validation_limits(path: Path) -> ProcessLimits:
    """Return the memory and time limits of a process that validates the ONNX file `path`.

    Raises:
        OSError: the file or its folder cannot be read.
    """
    size = path.stat().st_size + sum(
        f.stat().st_size for f in path.parent.iterdir() if _may_hold_weights(f, path)
    )
    memory = min(_BASE_BYTES + _COPIES * size, max(_BASE_BYTES, available_bytes()))
    return ProcessLimits(memory, _BASE_SECONDS + _SECONDS_PER_BYTE * size)


def _may_hold_weights(file: Path, graph: Path) -> bool:
    """Return whether a file next to the graph probably holds its weights, by its name."""
    return file != graph and file.is_file() and (".onnx" in file.name or file.suffix in (".data", ".bin"))


def subprocess_main(arguments: Sequence[str]) -> dict[str, Any]:
    """Validate the file of `arguments` in this process."""
    path = Path(arguments[0])
    try:
        model = _parse(path)
    except GraphFileError as error:
        return {"problems": messages_to_json([error_message(error.code, str(error))])}
    except OSError as error:
        return {"problems": messages_to_json([error_message("unreadable-file", str(error))])}
    problems = list(dict.fromkeys(_static_problems(model, path))) or list(_unbounded_problems(model))
    if not problems:
        from smelt.runtime.third_party.tensors import dominant_float_type

        problems += _session_problems(path, dominant_float_type(model))
    if problems:
        more = len(problems) - _MAX_PROBLEMS
        others = [error_message("more-problems", f"and {more} more")] if more > 0 else []
        return {"problems": messages_to_json([*problems[:_MAX_PROBLEMS], *others])}
    from smelt.runtime.third_party.graph_io import graph_signature

    return {
        "problems": [],
        "signature": graph_signature(model).model_dump(mode="json"),
        "files": _external_file_names(model),
        "details": _model_details(model),
    }


def _parse(path: Path) -> Any:
    """Return the onnx.ModelProto in `path`; external weights are not loaded.

    Raises:
        GraphFileError: it is not an ONNX model, with the reason.
    """
    import onnx

    size = path.stat().st_size
    if not size:
        raise GraphFileError("an empty file", code="empty-file")
    if size > _LARGEST:
        text = f"{size:,} bytes, but protobuf is limited to 2 GB: export it with external weights"
        raise GraphFileError(text, code="file-too-large")
    content = path.read_bytes()
    if content.startswith(_LFS_POINTER):
        raise GraphFileError(
            "a Git LFS pointer, not the model. Fetch it with `git lfs pull`", code="git-lfs-pointer"
        )
    try:
        model = onnx.ModelProto.FromString(content)
    except Exception as error:  # protobuf's own has no base that can be named here
        if "alloc" in str(error).lower():  # the parser exceeded the limit
            raise MemoryError from error
        text = f"not an ONNX file, or truncated ({size:,} bytes). Copy or export it again"
        raise GraphFileError(text, code="damaged-file") from error
    if not model.HasField("graph") or not model.graph.output or not model.ir_version:
        text = f"no graph in it: not an ONNX model, or truncated ({size:,} bytes)"
        raise GraphFileError(text, code="no-graph")
    return model


def _static_problems(model: Any, path: Path) -> Iterator[Message]:
    """Yield what is wrong with a model by static checks."""
    from smelt.runtime.third_party.graph_io import graph_io_problems
    from smelt.runtime.third_party.graph_structure import operator_problems, structure_problems
    from smelt.runtime.third_party.tensors import tensor_problems

    yield from _version_problems(model)
    yield from tensor_problems(model, path)
    yield from structure_problems(model)
    yield from operator_problems(model, _known_operators())
    yield from graph_io_problems(model)


def _unbounded_problems(model: Any) -> Iterator[Message]:
    """Yield what of an otherwise valid model has no limit."""
    from smelt.runtime.third_party.resource_limits import function_expansion_problems, infinite_loop_problems

    yield from function_expansion_problems(model)
    yield from infinite_loop_problems(model)


def _version_problems(model: Any) -> Iterator[Message]:
    import onnx

    if model.ir_version > onnx.IR_VERSION:
        known = f"onnx {onnx.__version__} supports {onnx.IR_VERSION} at most"
        text = f"its IR version is {model.ir_version}, but {known}"
        yield error_message("unsupported-ir-version", text)
    if not model.opset_import:
        text = "it does not declare the opset of its operators (opset_import)"
        yield error_message("missing-opset", text)
    for said in model.opset_import:
        most = onnx.defs.onnx_opset_version()
        if said.domain in ("", "ai.onnx") and said.version > most:
            yield error_message(
                "unsupported-opset",
                f"its operators are of opset {said.version}, but onnx {onnx.__version__} supports {most} at"
                " most: export it with an older opset",
            )


def _known_operators() -> set[tuple[str, str]]:
    """Return (domain, name) of every operator that the installed ONNX Runtime defines."""
    from onnxruntime.capi import onnxruntime_pybind11_state as runtime

    return {("" if s.domain == "ai.onnx" else s.domain, s.name) for s in runtime.get_all_operator_schema()}


def _session_problems(path: Path, float_type: str | None) -> list[Message]:
    """Return why a session, opened as by the runner, fails. float_type: the type of most weights."""
    from smelt.core.errors import SmeltError
    from smelt.runtime.backends.onnx_session import open_onnx_session

    try:
        open_onnx_session(path, threads=1)
    except SmeltError as error:
        words = " ".join(str(error.__cause__ or error).split())
        if is_out_of_memory(words):
            text = "opening it in ONNX Runtime requires more memory than expected for a file of its size"
            return [error_message("memory-limit", text)]
        code, advice = _code_and_advice(words, float_type)
        text = f"ONNX Runtime cannot load it: {words[:400].rstrip('.')}.{advice}".rstrip(".")
        return [error_message(code, text)]
    return []


def _code_and_advice(message: str, float_type: str | None) -> tuple[str, str]:
    """Return the code of an ONNX Runtime error, and the advice for a known kind of error."""
    if "two nodes with same node name" in message:
        advice = " Give each node a unique name, or none: node.ClearField('name') with the package onnx"
        return "duplicate-node-name", advice
    if "NOT_IMPLEMENTED" not in message:
        return "session-failed", ""
    if float_type in ("bfloat16", "float16", "float64"):
        advice = f" Its weights are {float_type}, unsupported by this operator on the CPU: export in float32"
        return "unsupported-weight-type", advice
    return (
        "unsupported-operator-types",
        " The CPU does not support these types in this operator: export in float32, or with another opset",
    )


def _external_file_names(model: Any) -> list[str]:
    from smelt.runtime.third_party.external_data import external_data_fields, is_external
    from smelt.runtime.third_party.tensors import iter_model_tensors

    return sorted(
        {
            external_data_fields(tensor)["location"]
            for tensor in iter_model_tensors(model)
            if is_external(tensor)
        }
    )


def _model_details(model: Any) -> dict[str, Any]:
    from smelt.runtime.third_party.graph_structure import all_nodes, random_nodes
    from smelt.runtime.third_party.tensors import (
        count_graph_parameters,
        count_quantized_tensors,
        dominant_float_type,
    )

    tops = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    operators = Counter(node.op_type for node in tops)
    inner = Counter(node.op_type for node in all_nodes(tops)) - operators  # in If, Loop and Scan
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), None)
    producer = f"{model.producer_name} {model.producer_version}".strip()
    return {
        "opset": opset,
        "nodes": len(model.graph.node),
        "parameters": count_graph_parameters(model),
        "producer": producer[:80],
        "operators": dict(operators.most_common()),
        "inner_operators": dict(inner.most_common()),
        "random": list(random_nodes(model)),
        "codes": count_quantized_tensors(model),
        "floats": dominant_float_type(model),
    }


def is_out_of_memory(message: str) -> bool:
    """Return whether ONNX Runtime's message means that an allocation failed."""
    return any(words in message for words in ("bad allocation", "std::bad_alloc", "Failed to allocate"))
