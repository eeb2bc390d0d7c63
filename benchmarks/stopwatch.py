"""What the report says of an artifact, beside a stopwatch around `smelt.load`.

    python benchmarks/stopwatch.py ARTIFACT --data TEST.jsonl.gz --batch-size 1

The rounds of smelt's timing process alternate with those of another process, which does what a user
does: `smelt.load(ARTIFACT, threads=1)`, then `generate` or `predict` on the same texts, with a clock
before and after. Wall time (p50) and processor time (mean of a call) should agree within 10 %; on a busy
machine look at the latter. Exits with 1 where neither does.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

AGREEMENT_TOLERANCE = 0.10
# as in smelt's own timing process: one thread for all, tokenizers included
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


class Stopwatch:
    """A process that uses an artifact as a user would, and times it."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "user"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | _ENVIRONMENT,
            text=True,
        )
        self._ask(job)
        self.times_ms: list[float] = []
        self.cpu_ms: list[float] = []

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def round(self) -> None:
        """Time some passes over all texts."""
        answer = self._ask({})
        self.times_ms += answer["times_ms"]
        self.cpu_ms += answer["cpu_ms"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def run_timed_user() -> None:
    """Be the stopwatch's process: load what the first line names, time a round for each further line."""
    import smelt

    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print to standard output
    job = json.loads(sys.stdin.readline())
    with smelt.load(job["artifact"], threads=1) as model:
        use: Callable[..., Any] = model.generate
        if model.task == "text-classification":
            use = model.predict
        calls = [partial(use, group, len(group), **job["generation"]) for group in job["groups"]]
        for call in calls:
            call()
        print("{}", file=answers, flush=True)
        for _ in sys.stdin:
            calls[-1]()
            answer: dict[str, list[float]] = {"times_ms": [], "cpu_ms": []}
            begin = time.perf_counter()
            while time.perf_counter() - begin < job["min_round_ms"] / 1000:
                for call in calls:
                    wall, processor = time.perf_counter(), time.process_time()
                    call()
                    answer["cpu_ms"].append(1000 * (time.process_time() - processor))
                    answer["times_ms"].append(1000 * (time.perf_counter() - wall))
            print(json.dumps(answer), file=answers, flush=True)


def compare(artifact: Path, texts: Sequence[str], settings: Any, new_tokens: int) -> dict[str, Any]:
    """Return p50 and mean processor time of a call, ms, as the report and as the stopwatch has them."""
    from smelt.core.artifact import read_artifact
    from smelt.evaluate.latency import TimingJob, measure_latency
    from smelt.evaluate.latency.settings import prompt_texts, truncate_prompts
    from smelt.evaluate.latency.summary import spread_over_lengths
    from smelt.evaluate.latency.worker import batch_by_length
    from smelt.generation.config import GenerationSettings
    from smelt.generation.runner import TextTools

    task: Any = read_artifact(artifact).manifest.task
    (size,) = settings.batch_sizes
    generation = {} if task == "text-classification" else {"max_new_tokens": new_tokens}
    used = list(texts)
    if task == "language-modeling":
        config = json.loads((artifact / "config.json").read_text(encoding="utf-8"))
        lengths = settings.prompt_tokens, settings.new_tokens
        stretches = prompt_texts(texts, settings.prompt_tokens)
        runner = SimpleNamespace(text=TextTools(artifact, config, {}))
        used, new = truncate_prompts(stretches, runner, lengths)
        generation = {"min_new_tokens": new, "max_new_tokens": new}
    count = size * max(2, -(-settings.texts // size))
    groups = batch_by_length([used[index] for index in spread_over_lengths(used, count)], None, size)
    watch = Stopwatch(
        {
            "artifact": str(artifact),
            "groups": [[example.text for example in group] for group in groups],
            "generation": generation,
            "min_round_ms": settings.min_round_ms,
        }
    )
    try:
        result = measure_latency(
            {"it": artifact},
            "it",
            TimingJob(
                texts,
                task,
                settings,
                GenerationSettings(max_new_tokens=new_tokens),
                text_counts={size: count},
            ),
            progress=lambda done, total, note="": watch.round(),
        )
    finally:
        watch.close()
    if result.errors:
        raise click.ClickException(str(result.errors["it"]))
    (row,) = result.rows["it"]
    reported = {"p50_ms": row["p50_ms"], "cpu_ms": row["cpu_ms"]}
    seen = {
        "p50_ms": statistics.median(watch.times_ms),
        "cpu_ms": statistics.fmean(watch.cpu_ms),
    }
    return {
        "report": reported | {"parts": row["parts"], "stable": row["stable"]},
        "stopwatch": seen,
        "ratio": {name: reported[name] / seen[name] for name in seen},
    }


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--data", type=click.Path(path_type=Path), help="Rows or lines (default: standard texts).")
@click.option("--batch-size", default=1, show_default=True)
@click.option("--texts", default=16, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--min-round-ms", default=200.0, show_default=True)
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--lengths", default=(32, 32), nargs=2, help="Of a language model: prompt and new tokens.")
@click.option("--json", "as_json", is_flag=True)
def main(
    artifact: Path,
    data: Path | None,
    batch_size: int,
    texts: int,
    rounds: int,
    min_round_ms: float,
    max_new_tokens: int,
    lengths: tuple[int, int],
    as_json: bool,
) -> None:
    """Compare the report's latency of ARTIFACT with a stopwatch."""
    from smelt.api.timing import STANDARD_TEXTS, read_samples
    from smelt.core.artifact import read_artifact
    from smelt.evaluate.latency import LatencySettings

    settings = LatencySettings(
        batch_sizes=(batch_size,),
        texts=texts,
        rounds=rounds,
        min_round_ms=min_round_ms,
        prompt_tokens=lengths[0],
        new_tokens=lengths[1],
    )
    task = read_artifact(artifact).manifest.task
    chosen = [sample.text for sample in read_samples(data, task)] if data else list(STANDARD_TEXTS)
    comparison = compare(artifact.resolve(), chosen, settings, max_new_tokens)
    if as_json:
        click.echo(json.dumps(comparison))
    else:
        for name, (one, two) in {
            n: (comparison["report"][n], comparison["stopwatch"][n]) for n in comparison["ratio"]
        }.items():
            click.echo(f"{name:13} report {one:9.3f}   stopwatch {two:9.3f}   ratio {one / two:.3f}")
    sys.exit(0 if any(abs(ratio - 1) <= AGREEMENT_TOLERANCE for ratio in comparison["ratio"].values()) else 1)


if __name__ == "__main__":
    run_timed_user() if sys.argv[1:] == ["user"] else main()
