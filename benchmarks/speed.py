"""The speeds that the documentation promises, measured: `make bench`.

Command-line start-up, planning, the first text, export, scoring, what a stage costs besides its own work,
and whether the report's latency is what a stopwatch around `smelt.load` reads. The parts that need a real
model skip with a reason where ../shared (or --model and --data) is not there.
"""

from __future__ import annotations

import contextlib
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"


def _time_command(*arguments: str, repeat: int = 5) -> list[float]:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        subprocess.run([Path(sys.executable).parent / "smelt", *arguments], check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return times


def _print_result(what: str, times: list[float], limit: float) -> bool:
    middle = statistics.median(times)
    verdict = "ok" if middle < limit else "TOO SLOW"
    spread = f"{min(times):.2f} to {max(times):.2f}" if len(times) > 1 else "once"
    click.echo(f"{what:58} {middle:7.2f} s  ({spread}; promised: under {limit:g} s)  {verdict}")
    return middle < limit


def _artifact(folder: Path) -> Any:
    from smelt.core.artifact import Artifact, Manifest

    manifest = Manifest(
        key="0" * 64,
        format="torch",
        task="translation",
        stage="model",
        settings={},
        seed=0,
        parent=None,
        versions={},
    )
    return Artifact(folder, manifest)


def _export(model: Path, data: dict[str, Any], out: Path) -> list[float]:
    from smelt.export.onnx_stage import Onnx
    from smelt.export.settings import OnnxSettings
    from smelt.stage import Context

    start = time.perf_counter()
    source = _artifact(model)
    context = Context(
        out=out, task="translation", data=data, seed=0, ancestors={"model": source}, score=lambda artifact: {}
    )
    Onnx()(source, OnnxSettings(), context)
    return [time.perf_counter() - start]


def _score(runner: Any, texts: list[str], batch_size: int) -> list[float]:
    from smelt.generation.config import GenerationSettings
    from smelt.runtimes.predict_texts import generate_texts

    start = time.perf_counter()
    with runner:
        generate_texts(runner, texts, GenerationSettings(), batch_size)
    return [time.perf_counter() - start]


def _time_real_model(model: Path, data: Path, batch_size: int) -> list[bool]:
    from smelt.data.splits import Columns
    from smelt.runtimes.registry import open_folder, open_runner
    from smelt.tasks.read_split import read_split

    split = read_split(str(data / "test.jsonl.gz"), "translation", Columns(), data)
    texts = [example.text for example in split.examples]
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        results = [
            _print_result(
                "export: encoder, decoder, simplified, parity",
                _export(model, {"validation": split.take(64)}, out),
                25,
            )
        ]
        title = f"greedy, {len(texts)} sentences, batches of {batch_size}"
        results.append(
            _print_result(f"{title}, torch", _score(open_runner(_artifact(model)), texts, batch_size), 60)
        )
        results.append(
            _print_result(
                f"{title}, onnxruntime", _score(open_folder(out, "onnx", "ort-cpu"), texts, batch_size), 30
            )
        )
        results += [_compare_with_stopwatch(out, data / "test.jsonl.gz", size) for size in (1, 8)]
    return results


_FIRST = """
import sys
import smelt
with smelt.load(sys.argv[1], threads=1) as model:
    print(model.generate([sys.argv[2]])[0], flush=True)
assert not {"torch", "transformers"} & set(sys.modules)
"""


def _first_text(model: Path, data: Path) -> list[bool]:
    """Time from starting Python to the first translated text, as int8 in ONNX Runtime."""
    import smelt

    with tempfile.TemporaryDirectory() as name:
        recipe = Path(name) / "recipe.yaml"
        steps = "[{quantize: {scheme: int8-dynamic}}, {onnx: {target: ort-cpu}, name: int8}]"
        recipe.write_text(
            f"model: {model}\ntask: translation\ndata: {{test: {data / 'test.jsonl.gz'}}}\n"
            f"stages: {steps}\nscore: {{latency: false}}\n",
            encoding="utf-8",
        )
        result = smelt.run(recipe, out=Path(name) / "run", limit=8, quiet=True)
        artifact = str(result.artifact("int8"))
        text = "A man is riding a bicycle."
        python = [_seconds_to_first_line(sys.executable, "-c", _FIRST, artifact, text) for _ in range(5)]
        return [
            _print_result("from starting Python to the first text of smelt.load, int8", python, 1.5),
            _print_result("smelt predict, one text, int8", _time_command("predict", artifact, text), 1.5),
        ]


def _seconds_to_first_line(*command: str) -> float:
    """Return the seconds until `command` has printed its first line."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        taken = time.perf_counter() - start
        process.communicate()
    if process.returncode or not line.strip():
        raise RuntimeError(f"{command[0]} ended with {process.returncode}, after {line!r}.")
    return taken


def _compare_with_stopwatch(graphs: Path, data: Path, batch_size: int) -> bool:
    """Compare the report's latency with a stopwatch around `smelt.load`, on the graphs just exported."""
    from smelt.core.artifact import FileRecord, write_manifest
    from smelt.core.files import MANIFEST, sha256_of

    files = {
        path.name: FileRecord(sha256=sha256_of(path), size_bytes=path.stat().st_size)
        for path in graphs.iterdir()
        if path.name != MANIFEST
    }
    manifest = _artifact(graphs).manifest.model_copy(
        update={"format": "onnx", "details": {"target": "ort-cpu"}, "files": files}
    )
    write_manifest(graphs, manifest)
    script = Path(__file__).parent / "stopwatch.py"
    options = ["--data", str(data), "--batch-size", str(batch_size), "--texts", "8", "--json"]
    command = [sys.executable, str(script), str(graphs), *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if not done.stdout:
        raise RuntimeError(done.stderr)
    found = json.loads(done.stdout)
    ratios = ", ".join(f"{name.removesuffix('_ms')} {ratio:.3f}" for name, ratio in found["ratio"].items())
    verdict = "ok" if done.returncode == 0 else "DIFFERENT"
    title = f"the stopwatch comparison, batch {batch_size}: report / stopwatch"
    click.echo(f"{title:58} {ratios}  (promised: one within 10 %)  {verdict}")
    return done.returncode == 0


def _step_overheads() -> list[float]:
    """Seconds per step of a fresh run of the quickstart besides the stages' own work and the scoring."""
    from unittest.mock import patch

    from smelt.pipeline.execute.run import RunOptions, run_plan
    from smelt.pipeline.execute.scoring import Scorer
    from smelt.pipeline.plan.load_plan import load_plan

    spent = 0.0

    def timed(work: Any) -> Any:
        def wrapper(*arguments: Any) -> Any:
            nonlocal spent
            start = time.perf_counter()
            try:
                return work(*arguments)
            finally:
                spent += time.perf_counter() - start

        return wrapper

    plan = load_plan("quickstart", ("score.latency=false", "recovered.max_steps=1", "gates={}"), "onnx-int8")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(Scorer, "score", timed(Scorer.score)))
        for cls in {step.stage_class for step in plan.steps}:
            stack.enter_context(patch.object(cls, "__call__", timed(cls.__call__)))
        start = time.perf_counter()
        result = run_plan(plan, RunOptions(out=Path(name) / "run", limit=8, quiet=True))
        wall = time.perf_counter() - start
    assert result.exit_code == 0, result.report
    return [(wall - spent) / (len(plan.steps) + 1)]


@click.command()
@click.option("--model", type=click.Path(path_type=Path), default=SHARED / "models" / "marian-small-en-de")
@click.option("--data", type=click.Path(path_type=Path), default=SHARED / "data" / "multi30k_en_de")
@click.option("--batch-size", default=32, show_default=True)
def main(model: Path, data: Path, batch_size: int) -> None:
    """Measure and compare with what is promised; exit 1 where a promise is not kept."""
    from smelt.evaluate.environment import cpu_model

    click.echo(f"{cpu_model()}, Python {platform.python_version()}")
    results = [
        _print_result("smelt --help", _time_command("--help"), 0.3),
        _print_result("smelt plan quickstart", _time_command("plan", "quickstart"), 3.0),
        _print_result("overhead of a step besides its own work and its scoring", _step_overheads(), 1.0),
    ]
    if model.is_dir() and data.is_dir():
        results += _first_text(model, data)
        results += _time_real_model(model, data, batch_size)
    else:
        click.echo(f"skipped: export and scoring need {model} and {data}")
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
