"""What TensorRT would refuse, or build into a wrong engine without a word, found in the ONNX file first.

TensorRT's parser stops at the first import error and names it by an assertion; some mistakes (an
infinite constant, a profile longer than the position table) it does not mention at all. The rules
(`rules/table.py`) find all of them at once and say which node and what to do; here they are called, and
profiles are checked. Numbers and rules: TensorRT 11 (https://docs.nvidia.com/deeplearning/tensorrt), tried
with 11.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from smelt.core.errors import RunError
from smelt.export.tensorrt.profile import DIMENSIONS, Shapes
from smelt.export.tensorrt.rules.graph import Problem, read
from smelt.export.tensorrt.rules.table import look
from smelt.export.tensorrt.rules.values import external_data
from smelt.runtime.foreign.values import NAMELESS

__all__ = ["Problem", "check_profile", "load_graph", "preflight"]


def load_graph(path: Path) -> Any:
    """Read an ONNX file without its external weights.

    Raises:
        RunError: it is damaged, empty, or something else than ONNX.
    """
    import onnx

    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf raises several kinds, all meaning the same
        raise RunError(
            f"{path}: not an ONNX file that can be read: {error}", code="damaged-file", file=str(path)
        ) from error
    if not model.HasField("graph"):  # protobuf reads nothing at all, and much else, as a model without one
        size = path.stat().st_size
        what = f"its {size:,} bytes hold no graph, so it is no ONNX model" if size else "the file is empty"
        code = "wrong-format" if size else "empty-file"
        text = f"{path}: {what}. Copy it again, or export the model again."
        raise RunError(text, code=code, file=str(path))
    return model


def preflight(model: Any, path: Path) -> list[Problem]:
    """Look for everything in the graph that TensorRT 11 would not take."""
    lost = list(external_data(model, path))
    if lost:  # no rule can look at values that are not there
        return [Problem("error", f.reason, f.place, f.mend, "external-data", path.name) for f in lost]
    return list(look(read(model, path)))


def check_profile(model: Any, shapes: Shapes, position_limit: int | None) -> list[Problem]:
    """Check that inputs which share a dimension agree, and that no length goes beyond the position table.

    Args:
        model: the ONNX model.
        shapes: min, opt and max shape by input name.
        position_limit: entries of the model's position table; None where it has none.
    """
    problems: list[Problem] = []
    inputs = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}
    for name in shapes.keys() - inputs.keys():
        known = ", ".join(inputs)
        text = f"the profile names the input '{name}'; the graph has {known}"
        problems.append(Problem("error", text, rule="profile-unknown-input"))
    seen: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, dimensions in inputs.items():
        # axes called `?` have nothing to do with each other
        dynamic = [at for at, d in enumerate(dimensions) if d.dim_param not in NAMELESS]
        if dynamic and name not in shapes:
            text = f"the input '{name}' is dynamic and has no entry in the profile"
            problems.append(Problem("error", text, rule="profile-missing-input"))
            continue
        for at in dynamic:
            word = dimensions[at].dim_param
            sizes = tuple(shape[at] for shape in shapes[name])
            other, expected = seen.setdefault(word, (name, sizes))
            if sizes != expected:
                text = f"'{name}' and '{other}' share the dimension '{word}' but get {sizes} and {expected}"
                problems.append(Problem("error", text, rule="profile-conflict"))
    return problems + list(_too_long(seen, position_limit))


def _too_long(seen: Mapping[str, tuple[str, tuple[int, ...]]], limit: int | None) -> Iterator[Problem]:
    if limit is None:
        return
    for word, (name, sizes) in seen.items():
        longest = sizes[-1] + (word in DIMENSIONS["past"])  # the cache, and the token that is added to it
        # the sum of cache and tokens looks nothing up
        if word not in (*DIMENSIONS["batch"], *DIMENSIONS["total"]) and longest > limit:
            yield Problem(
                "error",
                f"the profile lets '{name}' be {longest} tokens long, but the model has {limit} positions;"
                f" TensorRT would build it and read beyond the table. Lower tensorrt: {{lengths: ...}}",
                rule="profile-too-long",
            )
