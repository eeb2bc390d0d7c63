"""The command `smelt predict`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, TextIO

import click

from smelt.commands.options import FOLDER, device, search, show
from smelt.core.errors import InputError
from smelt.recipe.other_names import called


class _Predict(click.Command):
    """The command, which says where texts that begin with a dash stand."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            hint = called(error.option_name, [word for param in self.params for word in param.opts])
            if hint:
                raise click.UsageError(f"{error.message}{hint}", ctx) from error
            told = f"{error.format_message()} Texts that begin with a dash stand behind --:"
            raise click.UsageError(f"{told} smelt predict ARTIFACT -- TEXT", ctx) from error


@click.command(cls=_Predict, short_help="Run an artifact on texts, images or arrays.")
@click.argument("artifact", type=FOLDER)
@click.argument("text", nargs=-1)
@click.option("--data", type=click.Path(path_type=Path), help="Texts: a file of rows, or of lines (.txt).")
@click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="NAME",
    help="The column of --data with the texts; text_pair=NAME for the second one of a pair.",
)
@click.option(
    "--out",
    metavar="FILE.npz",
    type=click.Path(path_type=Path),
    help="Of arrays: write the outputs, by name, into this file instead of printing them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each text.")
@click.option("--batch-size", default=32, show_default=True, type=click.IntRange(1, 4096))
@search
@click.option("--sample", "do_sample", is_flag=True, help="Draw each token instead of taking the best.")
@click.option("--temperature", type=click.FloatRange(0, 100, min_open=True), help="Above 1: more varied.")
@click.option("--top-k", type=click.IntRange(min=0), help="Draw among the K most likely; 0: among all.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Draw among the likely ones.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Of the draws (default: 0).")
@click.option("--threads", type=click.IntRange(min=1))
@device
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
    """Run ARTIFACT on each TEXT, on the rows of --data, or on the lines of standard input.

    An artifact of the task `custom` takes --data FILE.npz and prints the outputs of each row as JSON, or
    writes all of them as arrays into --out FILE.npz.

    A tab parts the two texts of a pair. A sentence embedder prints the vector of a text, the cosine of a
    pair.
    """
    for name in ("temperature", "top_k", "top_p", "seed"):
        if generation[name] is not None and not generation["do_sample"]:
            raise click.UsageError(f"--{name.replace('_', '-')} means nothing without --sample.")
    if data is not None and text:
        raise click.UsageError("give texts or --data, not both.")
    if columns and data is None:
        raise click.UsageError("--column means nothing without --data.")
    from smelt.use.arrays import reads_arrays

    if reads_arrays(artifact):
        _of_arrays(artifact, data, out, as_json, threads, device, batch_size, bool(text or columns))
        return
    if out is not None:
        raise click.UsageError("--out is for outputs that are arrays; texts are printed.")
    from smelt.use.predict import Predictor
    from smelt.use.predict_data import examples_of, read_examples

    predictor = Predictor(artifact, generation, threads, device, batch_size, trust_engine)
    if data is None:
        texts, name = (text, "text") if text else (_lines(sys.stdin), "standard input, line")
        examples = examples_of(texts, predictor.task, name)
    else:
        examples = read_examples(data, predictor.task, columns)
    for answer in predictor.run(examples):
        line = answer.record if as_json else answer.line
        if sys.stdout.isatty():
            show(line)  # a model may have learned what moves a cursor
        else:
            click.echo(line)
    for warning in predictor.warnings:
        show(f"warning: {warning}", err=True)


def _of_arrays(
    artifact: Path,
    data: Path | None,
    out: Path | None,
    as_json: bool,
    threads: int | None,
    device: str,
    batch_size: int,
    texts: bool,
) -> None:
    """Print the outputs of a graph of arrays row by row, or write them into the file `out`."""
    from smelt.use.arrays import predict_to_file, predicted_lines

    if out is None:
        click.echo("\n".join(predicted_lines(artifact, data, as_json, threads, device, batch_size, texts)))
        return
    if data is None or as_json:
        raise click.UsageError("--out is for the outputs of all rows: with --data FILE.npz, without --json.")
    count = predict_to_file(artifact, data, out, threads, device, batch_size)
    show(f"Wrote the outputs of {count:,} rows into {out}.", err=True)


def _lines(stream: TextIO) -> list[str]:
    """Return the lines of `stream`; at a terminal say first that they are waited for.

    Raises:
        InputError: they are no text in the encoding that the system says.
    """
    if stream.isatty():
        show("Reading texts, one a line; end with Ctrl-D (on Windows: Ctrl-Z, Enter).", err=True)
    from smelt.use.predict_data import lines_of

    try:
        return lines_of(stream)
    except UnicodeDecodeError as error:
        raise InputError(
            f"standard input: not {error.encoding} text. Convert it to UTF-8.", code="not-utf8"
        ) from error
