"""The command `smelt bench`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from smelt.cli.options import device_options


@click.command(short_help="Compare the latency of artifacts.")
@click.argument("artifacts", nargs=-1, required=True, type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="File with the texts: a table, or one text per line (.txt).",
)
@click.option("--column", metavar="NAME", help="Column with the texts (default: as in a recipe).")
@click.option(
    "--batch-size",
    "sizes",
    multiple=True,
    default=(1, 8),
    show_default=True,
    type=click.IntRange(1, 4096),
    help="Texts per call; may be repeated.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    help="CPU threads per process (default: the artifact's setting, else 1).",
)
@device_options
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(3, 1000))
@click.option(
    "--texts", default=16, show_default=True, type=click.IntRange(1, 10_000), help="Number of texts."
)
@click.option("--max-new-tokens", type=click.IntRange(1, 4096), metavar="N", help="Maximum output length.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench(
    artifacts: tuple[Path, ...],
    data: Path | None,
    column: str | None,
    sizes: tuple[int, ...],
    threads: int | None,
    device: str,
    trust_engine: bool,
    rounds: int,
    texts: int,
    max_new_tokens: int | None,
    as_json: bool,
) -> None:
    """Measure the latency of ARTIFACTS and compare each with the first."""
    import json

    from smelt.api.benchmark import time_artifacts as measure
    from smelt.api.benchmark import timing_table
    from smelt.pipeline.execute.display import Display

    settings = {
        "batch_sizes": tuple(dict.fromkeys(sizes)),
        "threads": threads,
        "rounds": rounds,
        "texts": texts,
    }
    generation = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    if max_new_tokens is not None:
        settings["new_tokens"] = max_new_tokens  # language models are timed with exactly this many
    display = Display()  # writes to standard error, so that standard output is valid JSON
    display.start_work("latency")
    try:
        result = measure(
            artifacts, data, column, settings, generation, device, display.progress, trust_engine
        )
    finally:
        display.close()
    click.echo(json.dumps(result, indent=1) if as_json else timing_table(result))
    sys.exit(1 if any(a["error"] for a in result["artifacts"].values()) else 0)
