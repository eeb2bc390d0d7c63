"""Find, before the build, what TensorRT would reject in an ONNX file or silently compute differently.

TensorRT's parser stops at the first import error and names it by an assertion; some errors (an infinite
constant, a profile longer than the position table) it does not report at all. The rules (`operator_rules.py`,
`value_rules.py`) find all of them at once, with the node and what to do; this module runs them and checks
profiles. Limits and rules: TensorRT 11 (https://docs.nvidia.com/deeplearning/tensorrt), tested with 11.4.

A third-party file is checked with the same rules, in a subprocess with limits. The limits of memory and time,
and the checks before any value is read (size and offset of each tensor, names that connect the nodes), are
those of graphs that a recipe starts from. ONNX Runtime is not used.

The installed TensorRT parses a graph in a subprocess too: a native library that crashes may take its process
with it, and the parser needs a builder, which the full TensorRT creates only if there is a GPU. As a script:
`python -m smelt.export.tensorrt.preflight FILE` prints the errors as a JSON list.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from smelt.core.errors import InputError, RunError, SmeltError
from smelt.core.messages import Message
from smelt.core.system import IsolatedProcessError, child_environment, python_command, run_isolated
from smelt.export.tensorrt.build_engine import DIMENSION_NAMES, ProfileShapes, make_builder, parse_onnx
from smelt.export.tensorrt.operator_rules import OUTCOMES, run_rules
from smelt.export.tensorrt.value_rules import TensorrtProblem, missing_external_data, read_checked_graph
from smelt.runtimes.onnx_import.graph_files import UNNAMED_DIMENSIONS, tensor_problems
from smelt.runtimes.onnx_import.validate_graph import structure_problems, validation_limits

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
        problem_text = (
            f"its {size:,} bytes contain no graph: not an ONNX model" if size else "the file is empty"
        )
        code = "wrong-format" if size else "empty-file"
        text = f"{path}: {problem_text}. Copy it again, or export the model again."
        raise RunError(text, code=code, file=str(path))
    return model


def preflight(model: Any, path: Path) -> list[TensorrtProblem]:
    """Return everything in the graph that TensorRT 11 would reject or compute differently."""
    missing_files = list(missing_external_data(model, path))
    if missing_files:  # rules cannot check values that are missing
        return [
            TensorrtProblem("error", f.reason, f.location, f.hint, "external-data", path.name)
            for f in missing_files
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
        input_names = ", ".join(inputs)
        text = (
            f"the profile contains an input '{name}' that the graph does not have; its inputs are "
            f"{input_names}"
        )
        problems.append(TensorrtProblem("error", text, rule="profile-unknown-input"))
    sizes_by_dimension: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, dimensions in inputs.items():
        # dimensions called `?` are unrelated
        dynamic = [axis for axis, d in enumerate(dimensions) if d.dim_param not in UNNAMED_DIMENSIONS]
        if dynamic and name not in shapes:
            text = f"the dynamic input '{name}' is missing from the profile"
            problems.append(TensorrtProblem("error", text, rule="profile-missing-input"))
            continue
        for axis in dynamic:
            dimension = dimensions[axis].dim_param
            sizes = tuple(shape[axis] for shape in shapes[name])
            other, expected = sizes_by_dimension.setdefault(dimension, (name, sizes))
            if sizes != expected:
                text = (
                    f"'{name}' and '{other}' share the dimension '{dimension}' but have sizes {sizes} and"
                    f" {expected}"
                )
                problems.append(TensorrtProblem("error", text, rule="profile-conflict"))
    return problems + list(_position_problems(sizes_by_dimension, position_limit))


def _position_problems(
    seen: Mapping[str, tuple[str, tuple[int, ...]]], limit: int | None
) -> Iterator[TensorrtProblem]:
    if limit is None:
        return
    for dimension, (name, sizes) in seen.items():
        longest = sizes[-1] + (
            dimension in DIMENSION_NAMES["past"]
        )  # the cache, and the token that is appended to it
        # the sum of cache and tokens is not used as an index
        if dimension not in (*DIMENSION_NAMES["batch"], *DIMENSION_NAMES["total"]) and longest > limit:
            yield TensorrtProblem(
                "error",
                f"the profile allows {longest} tokens for '{name}', but the model has {limit} positions;"
                f" TensorRT would build the engine and read beyond the table. Lower tensorrt:"
                f" {{lengths: ...}}",
                rule="profile-too-long",
            )


_MAX_PROBLEMS = 20
_REEXPORT_HINT = "Copy it again, or export the model again."


def check_onnx_for_tensorrt(path: Path) -> list[TensorrtProblem]:
    """Return the problems of the file `path`: what TensorRT rejects or silently computes differently."""
    try:
        answer = run_isolated(__name__, [str(path)], validation_limits(path))
    except OSError as error:
        return [_unreadable_problem(path, f"{path}: the file cannot be read: {error.strerror}")]
    except IsolatedProcessError as error:
        return [_unreadable_problem(path, f"{path}: the check failed: {error}.")]
    return [TensorrtProblem(*problem) for problem in answer]


def subprocess_main(arguments: Sequence[str]) -> list[TensorrtProblem]:
    """Check the file that `arguments` name, in this process."""
    path = Path(arguments[0])
    try:
        model = load_graph(path)
        structural_problems = list(dict.fromkeys(_structural_problems(model, path)))
        if structural_problems:  # rules cannot check values that are missing
            more_text = [f"and {len(structural_problems) - _MAX_PROBLEMS} more"] * (
                len(structural_problems) > _MAX_PROBLEMS
            )
            return [
                TensorrtProblem("error", f"{text}.", "", _REEXPORT_HINT, "damaged", path.name)
                for text in [*map(str, structural_problems[:_MAX_PROBLEMS]), *more_text]
            ]
        return preflight(model, path)
    except RunError as error:
        if "alloc" in str(error.__cause__).lower():  # the parser reached the memory limit
            raise MemoryError from error
        return [_unreadable_problem(path, str(error))]


def _structural_problems(model: Any, path: Path) -> Iterator[Message]:
    """Yield the tensors that are not stored as the file declares, and broken connections."""
    yield from tensor_problems(model, path)
    yield from structure_problems(model)


def _unreadable_problem(path: Path, reason: str) -> TensorrtProblem:
    return TensorrtProblem("error", reason, rule="unreadable", graph=path.name)


_TIMEOUT_SECONDS = 300


class ParserResult(NamedTuple):
    """asked: the TensorRT version, None if none could run. errors: of the parser. why: why none could run."""

    asked: str | None
    errors: tuple[str, ...] = ()
    why: str = ""


def run_parser(path: Path) -> ParserResult:
    """Parse `path` with the installed TensorRT; if it cannot run, return the reason."""
    from smelt.runtimes.tensorrt_engine import find_tensorrt

    name = find_tensorrt()
    if name is None:
        return ParserResult(None, why="TensorRT is not installed (pip install tensorrt).")
    command = python_command("-m", __name__, str(path))
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
            env=child_environment(),
        )
    except (OSError, subprocess.SubprocessError) as error:
        return ParserResult(None, why=f"its process failed: {error}")
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        output = (done.stderr.strip() or "nothing").splitlines()[-1]
        return ParserResult(
            None, why=f"{name} exited with code {done.returncode}. Its output: {output[:200]}"
        )
    answer = json.loads(lines[-1])
    return ParserResult(answer["asked"], tuple(answer["errors"]), answer["why"])


def _parse_here(path: Path) -> ParserResult:
    """Parse `path` in this process."""
    from smelt.runtimes.tensorrt_engine import import_tensorrt, make_logger

    try:
        trt = import_tensorrt()
        logger = make_logger(trt)
        builder = make_builder(trt, logger, path.name)
    except SmeltError as error:
        return ParserResult(None, why=f"no builder can be created here. {error}")
    parser_version = f"{trt.__name__} {trt.__version__}"
    try:
        parse_onnx(trt, builder.create_network(0), logger, path)
    except SmeltError as error:
        return ParserResult(parser_version, tuple(str(error).splitlines()))
    return ParserResult(parser_version)


_MAX_SHOWN = 3
"""Nodes listed for one problem; a quantized model can have hundreds."""


@dataclass(frozen=True)
class GraphCheck:
    """The check of one graph. problems: results of the rules. verdict: result of TensorRT's parser."""

    path: Path
    problems: tuple[TensorrtProblem, ...]
    verdict: ParserResult

    @property
    def rejected(self) -> bool:
        """Whether TensorRT would reject the graph, or build an engine with wrong results."""
        return bool(self.verdict.errors) or any(p.severity == "error" for p in self.problems)


def check_tensorrt_graphs(source: Path) -> list[GraphCheck]:
    """Check an ONNX file, or all graphs of a folder.

    Raises:
        InputError: there is no ONNX file.
    """
    return [_check_graph(path) for path in _onnx_files(source)]


def _onnx_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(
            f"{path}: no such file or folder. Expected an ONNX file, or an artifact of the onnx stage.",
            code="missing-file",
            file=str(path),
        )
    paths = sorted(path.glob("*.onnx")) or sorted(path.glob("onnx/*.onnx"))
    if not paths:
        raise InputError(
            f"{path}: no .onnx file in this folder. Export the model first: onnx: {{target: tensorrt}}.",
            code="missing-graph",
            file=str(path),
        )
    return paths


def _check_graph(path: Path) -> GraphCheck:
    problems = tuple(check_onnx_for_tensorrt(path))
    if any(problem.rule in ("unreadable", "damaged") for problem in problems):
        return GraphCheck(path, problems, ParserResult(None, why="cannot read the file."))
    return GraphCheck(path, problems, run_parser(path))


def describe_checks(checks: list[GraphCheck]) -> str:
    """Return the problems as text, grouped by kind."""
    return "\n".join(line for checked in checks for line in _problem_lines(checked))


def _problem_lines(checked: GraphCheck) -> Iterator[str]:

    locations_by_problem: dict[tuple[str, str, str], list[str]] = {}
    for problem in checked.problems:
        kind = OUTCOMES.get(problem.rule, "rejected")
        locations_by_problem.setdefault((kind, problem.reason, problem.hint), []).append(problem.location)
    yield f"{checked.path}: {_summary_line(checked)}"
    for (problem_kind, reason, hint), locations in locations_by_problem.items():
        location_text = ", ".join(location for location in locations[:_MAX_SHOWN] if location)
        more_text = f" and {len(locations) - _MAX_SHOWN} more" if len(locations) > _MAX_SHOWN else ""
        yield f"  {problem_kind}: {location_text}{more_text}{': ' if location_text else ''}{reason}"
        if hint:
            yield f"    -> {hint}"
    yield from _verdict_lines(checked.verdict)


def _summary_line(checked: GraphCheck) -> str:
    if checked.rejected:
        return "TensorRT would reject this"
    return "builds, with problems" if checked.problems else "no problems found"


def _verdict_lines(verdict: ParserResult) -> Iterator[str]:
    if verdict.asked is None:
        yield f"  TensorRT's parser was not run: {verdict.why}"
    elif not verdict.errors:
        yield f"  TensorRT's parser ({verdict.asked}): accepted"
    for error in verdict.errors:
        yield f"  TensorRT's parser ({verdict.asked}): {error}"


def checks_as_json(checks: list[GraphCheck]) -> list[dict[str, Any]]:
    """Return the checks as JSON values: file, verdict and problems of each graph."""
    return [
        {
            "file": str(c.path),
            "rejected": c.rejected,
            "problems": [
                {
                    "rule": p.rule, "outcome": OUTCOMES.get(p.rule, "rejected"), "location": p.location,
                    "message": p.reason, "hint": p.hint,
                }
                for p in c.problems
            ],
            "parser": {
                "version": c.verdict.asked, "errors": list(c.verdict.errors), "not_run": c.verdict.why,
            },
        }
        for c in checks
    ]  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(_parse_here(Path(sys.argv[1]))._asdict()))
