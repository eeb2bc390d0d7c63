"""Is this ONNX file one that ONNX Runtime can run? Asked in a process of its own, with limits.

First the file alone is looked at: its size, its form, tensors and where they lie, names, circles, operators.
Only what is right so far is then opened as a session, which may fold constants without end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from smelt.core.memory import available_bytes
from smelt.runtime.foreign.limits import FailedError, Limits, ask
from smelt.runtime.foreign.signature import Signature

# What imports alone take, with room for a small graph; a hostile file gets no more.
_BASE_BYTES = 1_200_000_000
_BASE_SECONDS = 12.0
# of a file's bytes: as they were read, as a message, as a session's weights, and packed
_COPIES = 5
_SECONDS_PER_BYTE = 1 / 20e6
_LARGEST = (1 << 31) - 1  # bytes of a protobuf
_SHOWN = 8
_POINTER = b"version https://git-lfs"


class Examined(NamedTuple):
    """What is known of a file.

    problems: what keeps it from being used, as ends of sentences; where there are some, that is all.
    files: those beside it that hold weights, by their names. details: opset, nodes, parameters, producer.
    """

    problems: tuple[str, ...] = ()
    signature: Signature | None = None
    files: tuple[str, ...] = ()
    details: dict[str, Any] | None = None


def examine(path: Path) -> Examined:
    """Look at the ONNX file `path` and open it once, in a process of its own."""
    try:
        said = ask(__name__, [str(path)], limits_for(path))
    except OSError as error:
        return Examined((f"cannot be read: {error.strerror}",))
    except FailedError as error:
        return Examined((f"opening it in ONNX Runtime failed: {error}",))
    if said["problems"]:
        return Examined(tuple(said["problems"]))
    return Examined((), Signature.model_validate(said["signature"]), tuple(said["files"]), said["details"])


def limits_for(path: Path) -> Limits:
    """Return how much memory and processor time a process may take that looks at the ONNX file `path`.

    Raises:
        OSError: the file or its folder cannot be read.
    """
    size = path.stat().st_size + sum(f.stat().st_size for f in path.parent.iterdir() if _may_hold(f, path))
    memory = min(_BASE_BYTES + _COPIES * size, max(_BASE_BYTES, available_bytes()))
    return Limits(memory, _BASE_SECONDS + _SECONDS_PER_BYTE * size)


def _may_hold(file: Path, graph: Path) -> bool:
    """Say whether a file beside the graph probably holds its weights, by its name."""
    return file != graph and file.is_file() and (".onnx" in file.name or file.suffix in (".data", ".bin"))


def answer(arguments: Sequence[str]) -> dict[str, Any]:
    """Examine the file that `arguments` name, in this process."""
    path = Path(arguments[0])
    try:
        model = _parse(path)
    except (ValueError, OSError) as error:
        return {"problems": [str(error)]}
    problems = list(dict.fromkeys(_looked(model, path))) or list(_endless(model))
    if not problems:
        from smelt.runtime.foreign.tensors import stored_floats

        problems += _opened(path, stored_floats(model))
    if problems:
        more = len(problems) - _SHOWN
        return {"problems": problems[:_SHOWN] + ([f"and {more} more"] if more > 0 else [])}
    from smelt.runtime.foreign.values import signature_of

    return {
        "problems": [],
        "signature": signature_of(model).model_dump(mode="json"),
        "files": _files(model),
        "details": _facts(model),
    }


def _parse(path: Path) -> Any:
    """Return the onnx.ModelProto in `path`; weights that lie outside stay there.

    Raises:
        ValueError: it is none; says why.
    """
    import onnx

    size = path.stat().st_size
    if not size:
        raise ValueError("an empty file")
    if size > _LARGEST:
        raise ValueError(
            f"{size:,} bytes, and protobuf holds no more than 2 GB: weights have to lie beside it"
        )
    content = path.read_bytes()
    if content.startswith(_POINTER):
        raise ValueError("a Git LFS pointer, not the model. Fetch it with `git lfs pull`")
    try:
        model = onnx.ModelProto.FromString(content)
    except Exception as error:  # protobuf's own has no base that can be named here
        if "alloc" in str(error).lower():  # the parser ran into the limit
            raise MemoryError from error
        raise ValueError(
            f"not an ONNX file, or cut short ({size:,} bytes). Copy or export it again"
        ) from error
    if not model.HasField("graph") or not model.graph.output or not model.ir_version:
        raise ValueError(f"no graph in it: not an ONNX model, or cut short ({size:,} bytes)")
    return model


def _looked(model: Any, path: Path) -> Iterator[str]:
    """Yield what is wrong with a model as far as the file shows it."""
    from smelt.runtime.foreign.structure import operator_problems, structure_problems
    from smelt.runtime.foreign.tensors import tensor_problems
    from smelt.runtime.foreign.values import value_problems

    yield from _versions(model)
    yield from tensor_problems(model, path)
    yield from structure_problems(model)
    yield from operator_problems(model, _known_operators())
    yield from value_problems(model)


def _endless(model: Any) -> Iterator[str]:
    """Yield what of a model that is right otherwise never ends."""
    from smelt.runtime.foreign.endless import function_problems, loop_problems

    yield from function_problems(model)
    yield from loop_problems(model)


def _versions(model: Any) -> Iterator[str]:
    import onnx

    if model.ir_version > onnx.IR_VERSION:
        known = f"onnx {onnx.__version__} knows {onnx.IR_VERSION} at most"
        yield f"its IR version is {model.ir_version}, and {known}"
    if not model.opset_import:
        yield "it does not say of which opset its operators are (opset_import)"
    for said in model.opset_import:
        most = onnx.defs.onnx_opset_version()
        if said.domain in ("", "ai.onnx") and said.version > most:
            yield (
                f"its operators are of opset {said.version}, and onnx {onnx.__version__} knows {most} at"
                " most: export it with an older opset"
            )


def _known_operators() -> set[tuple[str, str]]:
    """Return (domain, name) of every operator that the installed ONNX Runtime has a definition of."""
    from onnxruntime.capi import onnxruntime_pybind11_state as runtime

    return {("" if s.domain == "ai.onnx" else s.domain, s.name) for s in runtime.get_all_operator_schema()}


def _opened(path: Path, floats: str | None) -> list[str]:
    """Open a session as the runner does; return why it cannot be. floats: the type of most weights."""
    from smelt.core.errors import SmeltError
    from smelt.runtime.backends.onnx_session import open_session

    try:
        open_session(path, threads=1)
    except SmeltError as error:
        words = " ".join(str(error.__cause__ or error).split())
        if lacks_memory(words):
            return ["opening it in ONNX Runtime asks for more memory than a file of its size should need"]
        return [
            f"ONNX Runtime cannot load it: {words[:400].rstrip('.')}.{_what_to_do(words, floats)}".rstrip(".")
        ]
    return []


def _what_to_do(words: str, floats: str | None) -> str:
    """Say what to do, where ONNX Runtime's words are of a kind that is known."""
    if "two nodes with same node name" in words:
        return " Give each node a name of its own, or none: node.ClearField('name') with the package onnx"
    if "NOT_IMPLEMENTED" not in words:
        return ""
    if floats in ("bfloat16", "float16", "float64"):
        return f" Its weights are {floats}, for which the CPU has no such operator: export it in float32"
    return " The CPU has no such operator for these types: export it in float32, or with another opset"


def _files(model: Any) -> list[str]:
    from smelt.runtime.foreign.outside import is_outside, location_of
    from smelt.runtime.foreign.tensors import tensors_of

    return sorted({location_of(tensor)["location"] for tensor in tensors_of(model) if is_outside(tensor)})


def _facts(model: Any) -> dict[str, Any]:
    from smelt.runtime.foreign.structure import all_nodes, random_nodes
    from smelt.runtime.foreign.tensors import codes, parameters, stored_floats

    tops = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    operators = Counter(node.op_type for node in tops)
    inner = Counter(node.op_type for node in all_nodes(tops)) - operators  # in If, Loop and Scan
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), None)
    producer = f"{model.producer_name} {model.producer_version}".strip()
    return {
        "opset": opset,
        "nodes": len(model.graph.node),
        "parameters": parameters(model),
        "producer": producer[:80],
        "operators": dict(operators.most_common()),
        "inner_operators": dict(inner.most_common()),
        "random": list(random_nodes(model)),
        "codes": codes(model),
        "floats": stored_floats(model),
    }


def lacks_memory(said: str) -> bool:
    """Say whether ONNX Runtime's words mean that an allocation failed."""
    return any(words in said for words in ("bad allocation", "std::bad_alloc", "Failed to allocate"))
