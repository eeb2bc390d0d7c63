"""The command `bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from smelt.cli.commands import device_options
from smelt.cli.output import print_json, print_untrusted
from smelt.core.errors import InputError


def _require_used_options(
    callers: tuple[int, ...], sizes: tuple[int, ...], requests: int | None, http: bool
) -> None:
    """Require that no option is given that the measurement does not use.

    Raises:
        InputError: `unused-setting`.
    """
    unused = {"--batch-size": sizes} if callers else {"--requests": requests, "--http": http}
    for name, value in unused.items():
        if value:
            reason = (
                f"a request has one text. Remove {name}."
                if callers
                else f"it needs --callers. Add --callers N, or remove {name}."
            )
            raise InputError(f"{name}: {reason}", code="unused-setting", setting=name)


@click.command(short_help="Compare the latency of artifacts.")
@click.argument("artifacts", nargs=-1, required=True, type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="File with the texts: a table, or one text per line (.txt).",
)
@click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="NAME",
    help="Column of --data with the texts; text_pair=NAME for the second text of pairs.",
)
@click.option(
    "--batch-size",
    "sizes",
    multiple=True,
    type=click.IntRange(1, 4096),
    help="Texts per call; may be repeated (default: 1 and 8).",
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
@click.option(
    "--callers",
    multiple=True,
    type=click.IntRange(1, 1024),
    help="Measure concurrent requests of so many callers; may be repeated, equal numbers count once.",
)
@click.option(
    "--requests",
    type=click.IntRange(1, 1_000_000),
    help="Requests per round of --callers (default: 100; at least four per caller).",
)
@click.option("--http", is_flag=True, help="Send the requests to each package's service, which is started.")
@click.option("--max-new-tokens", type=click.IntRange(1, 4096), metavar="N", help="Maximum output length.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench(
    artifacts: tuple[Path, ...],
    data: Path | None,
    columns: tuple[str, ...],
    sizes: tuple[int, ...],
    threads: int | None,
    device: str,
    trust_engine: bool,
    rounds: int,
    texts: int,
    callers: tuple[int, ...],
    requests: int | None,
    http: bool,
    max_new_tokens: int | None,
    as_json: bool,
) -> None:
    """Measure the latency of ARTIFACTS and compare each with the first.

    With --callers: latency and throughput under concurrent requests.
    """
    import json

    from smelt.api.concurrent_load import LoadSettings, load_table, measure_load
    from smelt.api.timing import time_artifacts as measure
    from smelt.api.timing import timing_table
    from smelt.pipeline.execute.display import Display

    _require_used_options(callers, sizes, requests, http)
    settings: dict[str, Any] = {
        "batch_sizes": tuple(dict.fromkeys(sizes or (1, 8))),
        "threads": threads,
        "rounds": rounds,
        "texts": texts,
    }
    generation = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    if max_new_tokens is not None:
        settings["new_tokens"] = max_new_tokens  # language models are timed with exactly this many
    display = Display()  # writes to standard error, so that standard output is valid JSON
    display.start_work("latency")
    options = (data, columns, generation, device, display.progress, trust_engine)
    try:
        if callers:
            load = LoadSettings(tuple(dict.fromkeys(callers)), requests or 100, rounds, threads, http, texts)
            result = measure_load(artifacts, load, *options)
        else:
            result = measure(artifacts, data, columns, settings, *options[2:])
    finally:
        display.close()
    if as_json:
        print_json(json.dumps(result, indent=1))
    else:
        print_untrusted(load_table(result) if callers else timing_table(result))
    sys.exit(1 if any(a["error"] for a in result["artifacts"].values()) else 0)
