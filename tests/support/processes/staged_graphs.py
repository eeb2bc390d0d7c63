"""Drawn graphs through the stages for ONNX: `python staged_graphs.py DRAWS HOME [SEED]` prints what is wrong.

Each graph that onnx and ONNX Runtime take by itself goes through `simplify`, `quantize-onnx` in seven ways
and `fp16`; a graph that is quantized already must be recognized, and goes through `simplify`. A stage may
refuse it with an error that has a code. What it writes must be a valid file that runs with one thread and
with two, and gives what the graph gave, or a warning. A draw has a process of its own, with limits: what a
native library does there ends that draw alone.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.support.graphs import random_graphs
from tests.support.graphs.random_graphs import RandomGraph

SECONDS, MEMORY = 120, 3 << 30
ROWS = 12
# Root mean square of the difference, as a share of that of the values, from which on it has to be told.
TOLERANCES = {
    "simplify": 1e-3,
    "fp16": 0.05,
    "dynamic": 0.4,
    "minmax": 0.4,
    "entropy": 0.4,
    "percentile": 0.4,
    "qoperator": 0.4,
    "int8-weight-only": 0.4,
    "int4": 0.4,
}
STAGES = tuple(TOLERANCES)


def draw_graphs(draws: int, number: int | None, see: Callable[[int, RandomGraph], None]) -> None:
    """Call `see` with each of so many drawn graphs and its number; without `number` always the same ones."""
    count = iter(range(10**9))

    @settings(
        max_examples=draws, database=None, deadline=None, derandomize=number is None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(random_graphs.random_graphs())
    def drawn(graph: RandomGraph) -> None:
        see(next(count), graph)

    (drawn if number is None else seed(number)(drawn))()


def find_faults(
    graph: RandomGraph, folder: Path, stages: tuple[str, ...] = STAGES
) -> tuple[list[str], list[str]]:
    """Return what is wrong of a graph in these stages, and how each ended; in processes of their own.

    A stage that crashes once more with its native parts in processes of their own, as a user has them, is
    wrong; else those are part of the process that is watched here, which takes a tenth of the time.
    """
    from smelt.runtimes.onnx_import.graph_files import count_quantized_tensors

    outcomes, remaining = [], list(stages)
    problems: list[str] = []
    if any(node.op_type == "DequantizeLinear" for node in graph.model.graph.node):
        remaining = [stage for stage in stages if stage == "simplify"]  # a plan refuses the others
        problems += [] if count_quantized_tensors(graph.model) else ["the plan: not seen as quantized"]
    while remaining:
        lines, signaled = _run_forked(
            lambda tell, some=remaining: _run_stages(graph, folder, some, True, tell), folder
        )
        for stage, end, problem in lines:
            outcomes.append(f"{stage}: {end}")
            problems += [f"{stage}: {problem}"] if problem else []
        remaining = remaining[len(lines) :]
        if remaining and remaining[0] in stages and signaled:
            [stage, *remaining] = remaining
            lines, signaled = _run_forked(
                lambda tell, one=stage: _run_stages(graph, folder, [one], False, tell), folder
            )
            end, problem = lines[0][1:] if lines else ("crashed", f"ended by signal {signaled}")
            outcomes.append(f"{stage}: {end}")
            problems += [f"{stage}: {problem}"] if problem else []
        elif not signaled and remaining:
            return [*problems, f"{remaining[0]}: the process ended early"], outcomes
    return problems, outcomes


def _run_forked(work: Callable[[Callable[[Any], None]], None], folder: Path) -> tuple[list[Any], int]:
    """Return what `work` told in a forked process with limits, and the signal that ended it."""
    reported = folder.with_suffix(".jsonl")
    reported.write_text("")
    child = os.fork()
    if not child:
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.RLIM_INFINITY))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)
            with reported.open("a") as file, open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)

                def tell(line: Any) -> None:
                    file.write(json.dumps(line) + "\n")
                    file.flush()

                try:
                    work(tell)
                except Exception:  # of this file itself
                    tell(("set-up", "raised", traceback.format_exc()[-600:]))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    lines = [json.loads(line) for line in reported.read_text().splitlines()]
    return lines, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _run_stages(
    graph: RandomGraph, folder: Path, stages: list[str], here: bool, tell: Callable[[Any], None]
) -> None:
    """Tell of each stage (stage, how it ended, what is wrong or None)."""
    from smelt.data.npz_arrays import SampleArrays
    from smelt.data.splits import split_from_arrays
    from tests.support.graphs import imported_graphs

    if here:
        _run_requests_inline()
    shutil.rmtree(folder, ignore_errors=True)
    source = imported_graphs.make_artifact(folder / "source", graph.model)
    data = {"calibration": split_from_arrays("rows.npz", SampleArrays(graph.rows(ROWS, 1), ROWS))}
    expected = _run_graph(folder / "source" / "model.onnx", graph, 1)
    for stage in stages:
        end, problem = _run_stage(stage, source, data, graph, expected, folder / stage)
        tell((stage, end, problem))


def _run_requests_inline() -> None:
    """Let stages do in this process, which is watched, what they ask of processes of their own."""
    import importlib

    def run_here(name: str, arguments: Any, limits: Any) -> Any:
        module, _, function = name.partition(":")
        main = getattr(importlib.import_module(module), function or "subprocess_main")
        return json.loads(json.dumps(main(list(arguments))))

    for name in ("smelt.export.onnx_models.simplify", "smelt.runtimes.onnx_import.trial_run"):
        importlib.import_module(name).run_isolated = run_here  # type: ignore[attr-defined]


def _run_stage(
    name: str, source: Any, data: Any, graph: RandomGraph, wanted: list[Any], out: Path
) -> tuple[str, str | None]:
    """Return how a stage ended, and what is wrong with that."""
    import onnx

    from smelt.core.errors import SmeltError
    from tests.support import harness

    stage, chosen = _stage_and_settings(name)
    try:
        ctx = harness.run_stage(stage, chosen, source, out, data=data)
    except SmeltError as error:
        message = re.sub(r"\S*draw/\S*", "FILE", " ".join(str(error).split()))
        end = f"refused {error.code}" + (f" {message[:300]}" if "SMELT_DRAWS_SHOWN" in os.environ else "")
        return end, None if error.code else f"an error without a code: {message[:300]}"
    except Exception as error:  # whatever a stage does not foresee
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return (
            "raised",
            f"{type(error).__name__}: {str(error)[:300]} ({Path(frame.filename).name}:{frame.lineno})",
        )
    path = out / "model.onnx"
    try:
        onnx.checker.check_model(str(path), full_check=False)
    except Exception as error:  # of several kinds
        return "invalid", f"onnx.checker: {' '.join(str(error).split())[:300]}"
    for threads in (1, 2):
        try:
            outputs = _run_graph(path, graph, threads)
        except Exception as error:
            return "invalid", f"ONNX Runtime, {threads} threads: {' '.join(str(error).split())[:300]}"
        if (off := _worst_difference(outputs, wanted)) > TOLERANCES[name] and not ctx.warnings:
            return (
                "far",
                f"{off:.3g} off with {threads} threads, parity {ctx.details.get('parity')}, no warning",
            )
    return (f"warned {ctx.warnings[0].code}" if ctx.warnings else "done"), None


def _stage_and_settings(name: str) -> tuple[Any, Any]:
    from smelt.export.onnx_models import weight_only
    from smelt.export.onnx_models.fp16 import Fp16, Fp16Settings
    from smelt.export.onnx_models.quantize_onnx import QuantizeOnnx
    from smelt.export.onnx_models.settings import WEIGHT_ONLY_SCHEMES, QuantizeOnnxSettings
    from smelt.export.onnx_models.simplify import Simplify, SimplifySettings

    if name == "simplify":
        return Simplify(), SimplifySettings()
    if name == "fp16":
        return Fp16(), Fp16Settings()
    if name == "dynamic":
        return QuantizeOnnx(), QuantizeOnnxSettings(scheme="int8-dynamic")
    if name == "qoperator":
        return QuantizeOnnx(), QuantizeOnnxSettings(scheme="int8-static", quant_format="qoperator")
    if name in WEIGHT_ONLY_SCHEMES:
        weight_only._NODE_BYTES = -(10**6)  # so that the small matrices of drawn graphs are quantized too
        return QuantizeOnnx(), QuantizeOnnxSettings(scheme=name)
    return QuantizeOnnx(), QuantizeOnnxSettings(scheme="int8-static", calibration_method=name)  # type: ignore[arg-type]


def _run_graph(path: Path, graph: RandomGraph, threads: int) -> list[Any]:
    """Return the outputs of a graph on the calibration rows in other batches, opened as users do.

    Other rows may lie outside of the ranges that a stage saw, which it cannot warn of.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    rows, size = graph.rows(ROWS, 1), graph.batch or 5
    input_names = {graph_input.name for graph_input in session.get_inputs()}
    return [
        session.run(
            None,
            {
                name: v if v.ndim == 0 else v[::-1][start : start + size]
                for name, v in rows.items()
                if name in input_names
            },
        )
        for start in range(0, ROWS, size)
    ]


def _worst_difference(got: list[Any], wanted: list[Any]) -> float:
    """Return how far the worst output is off: root mean squares; infinite where shape or finiteness is."""
    worst = 0.0
    for outputs in zip(zip(*got, strict=True), zip(*wanted, strict=True), strict=True):
        for a, b in zip(*outputs, strict=True):
            if a.shape != b.shape or a.dtype != b.dtype:
                return float("inf")
        a, b = (np.concatenate([np.ravel(array) for array in output_arrays]) for output_arrays in outputs)
        if b.dtype.kind != "f":
            worst = max(worst, float(np.mean(a != b)) if b.size else 0.0)
            continue
        is_finite = np.isfinite(b)
        if not np.array_equal(is_finite, np.isfinite(a)):
            return float("inf")
        a, b = a[is_finite].astype(np.float64), b[is_finite].astype(np.float64)
        size = float(np.sqrt(np.mean(b**2))) if b.size else 0.0
        if b.size:
            worst = max(worst, float(np.sqrt(np.mean((a - b) ** 2))) / (size or 1.0))
    return worst


def unsupported_reason(graph: RandomGraph, folder: Path) -> str | None:
    """Return why onnx or ONNX Runtime does not take the graph by itself."""

    def look(tell: Callable[[Any], None]) -> None:
        import onnx

        folder.mkdir(exist_ok=True)
        path = folder / "alone.onnx"
        path.write_bytes(graph.model.SerializeToString())
        try:
            onnx.checker.check_model(str(path), full_check=True)
            _run_graph(path, graph, 2)
        except Exception as error:
            tell(" ".join(str(error).split())[:400])
            return
        tell(None)

    lines, signaled = _run_forked(look, folder)
    return f"signal {signaled}" if not lines else lines[0]


def main(draws: int, home: Path, number: int | None = None) -> int:
    """Print what is wrong, with the number of its draw, and keep those graphs in `home`; return how many."""
    import onnxruntime
    import onnxsim  # noqa: F401
    from onnxruntime import quantization  # noqa: F401

    from tests.support import harness  # noqa: F401  what all draws need is imported once

    onnxruntime.set_default_logger_severity(4)
    home.mkdir(parents=True, exist_ok=True)
    outcomes, num_faults = Counter[str](), 0

    def see(index: int, graph: RandomGraph) -> None:
        nonlocal num_faults
        if (problem := unsupported_reason(graph, home / "draw")) is not None:
            outcomes["not valid by itself"] += 1
            outcomes[f"  {problem[:150]}"] += "SMELT_DRAWS_SHOWN" in os.environ
            return
        problems, results = find_faults(graph, home / "draw")
        outcomes.update(results)
        for fault_text in problems:
            print(f"{index}: {graph}: {fault_text}", flush=True)
            (home / f"{index}.onnx").write_bytes(graph.model.SerializeToString())
            (home / f"{index}.json").write_text(json.dumps([[vars(i) for i in graph.inputs], graph.batch]))
        num_faults += len(problems)

    draw_graphs(draws, number, see)
    for end, count in sorted(outcomes.items()):
        print(f"{count:5} {end}", file=sys.stderr)
    print(f"drawn: {draws}", file=sys.stderr)
    return num_faults


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[3:4]]
    sys.exit(min(100, main(int(sys.argv[1]), Path(sys.argv[2]), *numbers)))
