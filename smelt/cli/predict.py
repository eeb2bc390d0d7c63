"""The command `smelt predict`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, TextIO

import click

from smelt.cli.options import FOLDER_TYPE, device_options, generation_options, print_untrusted
from smelt.core.errors import InputError
from smelt.pipeline.recipe.mistakes import other_name_hint


class _PredictCommand(click.Command):
    """A command whose errors explain how to pass texts that begin with a dash."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            hint = other_name_hint(error.option_name, [word for param in self.params for word in param.opts])
            if hint:
                raise click.UsageError(f"{error.message}{hint}", ctx) from error
            message = f"{error.format_message()} Put texts that begin with a dash after --:"
            raise click.UsageError(f"{message} smelt predict ARTIFACT -- TEXT", ctx) from error


@click.command(cls=_PredictCommand, short_help="Run an artifact on texts, images or arrays.")
@click.argument("artifact", type=FOLDER_TYPE)
@click.argument("text", nargs=-1)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Input file: a table, one text per line (.txt), or arrays (.npz).",
)
@click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="NAME",
    help="Column of --data with the texts; text_pair=NAME for the second text of pairs.",
)
@click.option(
    "--out",
    metavar="FILE.npz",
    type=click.Path(path_type=Path),
    help="Task custom: write the outputs to this file instead of printing them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON per sample.")
@click.option("--batch-size", default=32, show_default=True, type=click.IntRange(1, 4096))
@generation_options
@click.option("--sample", "do_sample", is_flag=True, help="Sample tokens instead of greedy search.")
@click.option(
    "--temperature",
    type=click.FloatRange(0, 100, min_open=True),
    help="Sampling temperature; higher is more varied.",
)
@click.option("--top-k", type=click.IntRange(min=0), help="Sample among the K most likely tokens; 0: all.")
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    help="Sample among the most likely tokens with this total probability.",
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Random seed for sampling (default: 0).")
@click.option("--threads", type=click.IntRange(min=1))
@device_options
def predict(
    artifact: Path,
    text: tuple[str, ...],
    data: Path | None,
    columns: tuple[str, ...],
    out: Path | None,
    as_json: bool,
    batch_size: int,
    threads: int | None,
    device: str,
    trust_engine: bool,
    **generation: Any,
) -> None:
    """Run ARTIFACT on each TEXT, on the samples of --data, or on the lines of standard input.

    An artifact of the task `custom` needs --data FILE.npz. It prints the outputs of each sample as JSON, or
    writes all outputs as arrays to --out FILE.npz.

    Separate the two texts of a pair with a tab. A sentence embedder prints the vector of a text, or the
    cosine similarity of a pair.
    """
    for name in ("temperature", "top_k", "top_p", "seed"):
        if generation[name] is not None and not generation["do_sample"]:
            raise click.UsageError(f"--{name.replace('_', '-')} needs --sample.")
    if data is not None and text:
        raise click.UsageError("pass texts or --data, not both.")
    if columns and data is None:
        raise click.UsageError("--column needs --data.")
    from smelt.api.array_models import reads_arrays

    if reads_arrays(artifact):
        _predict_arrays(artifact, data, out, as_json, threads, device, batch_size, bool(text or columns))
        return
    if out is not None:
        raise click.UsageError("--out is only for the task custom; other outputs are printed.")
    from smelt.api.predict import Predictor, as_examples, read_examples

    predictor = Predictor(artifact, generation, threads, device, batch_size, trust_engine)
    if data is None:
        texts, name = (text, "text") if text else (_stdin_lines(sys.stdin), "standard input, line")
        examples = as_examples(texts, predictor.task, name)
    else:
        examples = read_examples(data, predictor.task, columns)
    for answer in predictor.run(examples):
        line = answer.json_line if as_json else answer.line
        if sys.stdout.isatty():
            print_untrusted(line)  # a model may generate control characters
        else:
            click.echo(line)
    for warning in predictor.warnings:
        print_untrusted(f"warning: {warning}", err=True)


def _predict_arrays(
    artifact: Path,
    data: Path | None,
    out: Path | None,
    as_json: bool,
    threads: int | None,
    device: str,
    batch_size: int,
    texts: bool,
) -> None:
    """Print the outputs of a `custom` artifact per sample, or write them to the file `out`."""
    from smelt.api.array_models import predict_to_file, prediction_lines

    if out is None:
        click.echo("\n".join(prediction_lines(artifact, data, as_json, threads, device, batch_size, texts)))
        return
    if data is None or as_json:
        raise click.UsageError("--out needs --data FILE.npz and cannot be combined with --json.")
    count = predict_to_file(artifact, data, out, threads, device, batch_size)
    print_untrusted(f"Wrote the outputs of {count:,} samples to {out}.", err=True)


def _stdin_lines(stream: TextIO) -> list[str]:
    """Return the lines of `stream`; on a terminal, print a prompt first.

    Raises:
        InputError: the input is not valid text in the system's encoding.
    """
    if stream.isatty():
        print_untrusted("Reading texts, one per line. End with Ctrl-D (on Windows: Ctrl-Z, Enter).", err=True)
    from smelt.api.predict import strip_lines

    try:
        return strip_lines(stream)
    except UnicodeDecodeError as error:
        raise InputError(
            f"standard input: not valid {error.encoding}. Convert it to UTF-8.", code="not-utf8"
        ) from error
