"""The command `smelt bench`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from smelt.commands.options import device


@click.command(short_help="Time artifacts side by side.")
@click.argument("artifacts", nargs=-1, required=True, type=click.Path(path_type=Path, file_okay=False))
@click.option("--data", type=click.Path(path_type=Path), help="Texts: a file of rows, or of lines (.txt).")
@click.option("--column", metavar="NAME", help="The column with the texts (default: as in a recipe).")
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
    help="Per process (default: those that an artifact names, else 1).",
)
@device
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(3, 1000))
@click.option("--texts", default=16, show_default=True, type=click.IntRange(1, 10_000), help="How many.")
@click.option("--max-new-tokens", type=click.IntRange(1, 4096), metavar="N", help="The longest output.")
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
    """Time ARTIFACTS side by side; the first is what the others are against."""
    import json

    from smelt.execute.display import Display
    from smelt.use.bench import bench as measure
    from smelt.use.bench import bench_text

    settings = {
        "batch_sizes": tuple(dict.fromkeys(sizes)),
        "threads": threads,
        "rounds": rounds,
        "texts": texts,
    }
    generation = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    if max_new_tokens is not None:
        settings["new_tokens"] = max_new_tokens  # of a language model, which always makes so many
    display = Display()  # on standard error: what is printed stays JSON
    display.begin("latency")
    try:
        result = measure(
            artifacts, data, column, settings, generation, device, display.progress, trust_engine
        )
    finally:
        display.close()
    click.echo(json.dumps(result, indent=1) if as_json else bench_text(result))
    sys.exit(1 if any(a["error"] for a in result["artifacts"].values()) else 0)
