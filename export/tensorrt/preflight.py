"""Find, before the build, what TensorRT would reject in an ONNX file or silently compute differently.

TensorRT's parser stops at the first import error and names it by an assertion; some errors (an infinite
constant, a profile longer than the position table) it does not report at all. The rules
(`rules/rule_table.py`) find all of them at once, with the node and what to do; this module runs them and
checks profiles. Limits and rules: TensorRT 11 (https://docs.nvidia.com/deeplearning/tensorrt), tested with
11.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from smelt.core.errors import RunError
from smelt.export.tensorrt.build_engine import DIMENSION_NAMES, ProfileShapes
from smelt.export.tensorrt.rules.checked_graph import TensorrtProblem, read_checked_graph
from smelt.export.tensorrt.rules.rule_table import run_rules
from smelt.export.tensorrt.rules.value_rules import missing_external_data
from smelt.runtimes.third_party.graph_files import UNNAMED_DIMENSIONS

__all__ = ["TensorrtProblem", "check_profile", "load_graph", "preflight"]


def load_graph(path: Path) -> Any:
    """Read an ONNX file without its external weights.

    Raises:
        RunError: it is damaged, empty, or not an ONNX file.
    """
    import onnx

    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf raises several classes for the same error
        raise RunError(
            f"{path}: not an ONNX file that can be read: {error}", code="damaged-file", file=str(path)
        ) from error
    if not model.HasField("graph"):  # protobuf parses an empty file, and others, as a model without graph
        size = path.stat().st_size
        what = f"its {size:,} bytes contain no graph: not an ONNX model" if size else "the file is empty"
        code = "wrong-format" if size else "empty-file"
        text = f"{path}: {what}. Copy it again, or export the model again."
        raise RunError(text, code=code, file=str(path))
    return model


def preflight(model: Any, path: Path) -> list[TensorrtProblem]:
    """Return everything in the graph that TensorRT 11 would reject or compute differently."""
    lost = list(missing_external_data(model, path))
    if lost:  # rules cannot check values that are missing
        return [
            TensorrtProblem("error", f.reason, f.location, f.hint, "external-data", path.name) for f in lost
        ]
    return list(run_rules(read_checked_graph(model, path)))


def check_profile(model: Any, shapes: ProfileShapes, position_limit: int | None) -> list[TensorrtProblem]:
    """Check that inputs which share a dimension agree, and that no length exceeds the position table.

    Args:
        model: the ONNX model.
        shapes: min, opt and max shape by input name.
        position_limit: entries of the model's position table; None if it has none.
    """
    problems: list[TensorrtProblem] = []
    inputs = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}
    for name in shapes.keys() - inputs.keys():
        known = ", ".join(inputs)
        text = f"the profile contains an input '{name}' that the graph does not have; its inputs are {known}"
        problems.append(TensorrtProblem("error", text, rule="profile-unknown-input"))
    seen: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, dimensions in inputs.items():
        # dimensions called `?` are unrelated
        dynamic = [at for at, d in enumerate(dimensions) if d.dim_param not in UNNAMED_DIMENSIONS]
        if dynamic and name not in shapes:
            text = f"the dynamic input '{name}' is missing from the profile"
            problems.append(TensorrtProblem("error", text, rule="profile-missing-input"))
            continue
        for at in dynamic:
            word = dimensions[at].dim_param
            sizes = tuple(shape[at] for shape in shapes[name])
            other, expected = seen.setdefault(word, (name, sizes))
            if sizes != expected:
                text = (
                    f"'{name}' and '{other}' share the dimension '{word}' but have sizes {sizes} and"
                    f" {expected}"
                )
                problems.append(TensorrtProblem("error", text, rule="profile-conflict"))
    return problems + list(_position_problems(seen, position_limit))


def _position_problems(
    seen: Mapping[str, tuple[str, tuple[int, ...]]], limit: int | None
) -> Iterator[TensorrtProblem]:
    if limit is None:
        return
    for word, (name, sizes) in seen.items():
        longest = sizes[-1] + (
            word in DIMENSION_NAMES["past"]
        )  # the cache, and the token that is appended to it
        # the sum of cache and tokens is not used as an index
        if word not in (*DIMENSION_NAMES["batch"], *DIMENSION_NAMES["total"]) and longest > limit:
            yield TensorrtProblem(
                "error",
                f"the profile allows {longest} tokens for '{name}', but the model has {limit} positions;"
                f" TensorRT would build the engine and read beyond the table. Lower tensorrt:"
                f" {{lengths: ...}}",
                rule="profile-too-long",
            )
