"""The commands `init`, `package`, `predict`, `shrink`, `store`, `tensorrt-check`; shared options."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from smelt.cli.output import print_json, print_result, print_summary, print_untrusted, reader_has_ended
from smelt.core.errors import InputError

if TYPE_CHECKING:
    from smelt.api.predict import ExampleOutput

FOLDER_TYPE = click.Path(path_type=Path, file_okay=False)
FILE_TYPE = click.Path(path_type=Path, dir_okay=False)


class _StoreType(click.ParamType[Path | str]):
    """A folder, or the URL of a remote store as text."""

    name = "folder or url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | str:
        """Return the value as given on the command line."""
        from smelt.core.remote_store import is_store_url

        if isinstance(value, str) and is_store_url(value):
            if value.startswith("memory:"):
                raise InputError(
                    f"{value}: a store in memory ends with the command. Give a folder or a bucket.",
                    code="invalid-store-url",
                    setting="--store",
                )
            return value
        return Path(FOLDER_TYPE.convert(value, param, ctx))


def store_option(command: Any) -> Any:
    """Add the option for the store of runs."""
    return click.option(
        "--store",
        type=_StoreType(),
        metavar="FOLDER|URL",
        help="Stored artifacts: a folder (default: .store next to the run), or a bucket such as"
        " s3://bucket/prefix.",
    )(command)


def generation_options(command: Any) -> Any:
    """Add the options for text generation."""
    max_new_tokens = click.option(
        "--max-new-tokens",
        type=click.IntRange(1, 4096),
        metavar="N",
        help="Maximum output length (default: as in the run, else the model's, else 128).",
    )
    num_beams = click.option(
        "--num-beams",
        type=click.IntRange(1, 64),
        help="Number of beams; 1 is greedy search (default: as in the run, else 1).",
    )
    return num_beams(max_new_tokens(command))


def sample_options(command: Any) -> Any:
    """Add the options for the columns and the languages of samples."""
    command = click.option(
        "--target-language", metavar="CODE", help="Multilingual models: target, such as de_DE."
    )(command)
    command = click.option(
        "--source-language", metavar="CODE", help="Multilingual models: source, such as en_XX."
    )(command)
    return click.option(
        "--column",
        "columns",
        multiple=True,
        metavar="ROLE=NAME",
        help="Name of a column, such as label=stars; may be repeated.",
    )(command)


def device_options(command: Any) -> Any:
    """Add the options for the device and for trusting TensorRT engines."""
    device_type = click.Choice(["auto", "cpu", "cuda"])
    command = click.option(
        "--trust-engine", is_flag=True, help="Allow a TensorRT engine built elsewhere (it is native code)."
    )(command)
    return click.option(
        "--device", default="auto", show_default=True, type=device_type, help="Device to run on."
    )(command)


def executor_option(command: Any) -> Any:
    """Add the option for the machines that run steps."""
    return click.option(
        "--executor",
        metavar="ray[://HOST:PORT]",
        help="Run steps as tasks of a Ray cluster: this machine's, or that of a head's address.",
    )(command)


@click.command(short_help="Write a first recipe for a model.")
@click.argument("model", required=False)
@click.option(
    "--data",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Folder with train, validation and test, or one file, which is split; may be repeated.",
)
@click.option("--out", metavar="FILE", help="File to write (default: NAME.yaml here); - prints the recipe.")
@click.option("--task", help="Task, if the model's family supports several.")
@sample_options
@click.option("--fast", is_flag=True, help="Propose stronger compression with longer training.")
@click.option("--serve", is_flag=True, help="Propose int8 whose answers do not depend on other requests.")
@click.option("--module", metavar="NAME", help="Instead of MODEL: a PyTorch module, package.module:function.")
@click.option("--weights", type=click.Path(path_type=Path), help="The module's state_dict, .safetensors.")
@click.option("--image-size", type=click.IntRange(1), help="A module of images: pixels per side.")
@click.option("--processor", type=click.Path(path_type=Path), help="Instead: preprocessor_config.json.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="A module of texts: tokenizer's folder.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def init(
    model: str | None,
    data: tuple[Path, ...],
    out: str | None,
    task: Any,
    columns: tuple[str, ...],
    source_language: str | None,
    target_language: str | None,
    fast: bool,
    force: bool,
    **others: Any,
) -> None:
    """Write a first recipe for MODEL (a folder, a hub id or an .onnx file), or for a PyTorch module."""
    from smelt.pipeline.inspect.data_files import parse_columns
    from smelt.pipeline.inspect.init_module import ModuleOptions
    from smelt.pipeline.inspect.init_recipe import InitOptions, init_module_recipe, init_recipe

    serve = others.pop("serve")
    if (model is None) == (others["module"] is None):
        raise click.UsageError("Name either MODEL or --module.")
    if model is not None and any(value is not None for value in others.values()):
        raise click.UsageError("--weights, --image-size, --processor and --tokenizer belong to --module.")
    if model is None and (others["weights"] is None or task or fast or serve):
        raise click.UsageError("--module needs --weights, and is not used with --task, --fast and --serve.")
    _require_task(task)
    column_names = parse_columns(columns).model_dump(exclude_unset=True)
    options = InitOptions(task, column_names, (source_language, target_language), fast, serve)
    if model is not None:
        text, path = init_recipe(model, data, out, task, force, options)
    else:
        text, path = init_module_recipe(ModuleOptions(**others, columns=column_names), data, out, force)
    if path is None:
        print_result(text.removesuffix("\n"))
        return
    hint = "" if data else "\nSet your files under data in the recipe."
    print_summary(f"Wrote {path}.{hint}\nNext: smelt plan {path}")


@click.command(short_help="Make a model smaller or faster, within a loss.")
@click.argument("model")
@click.option(
    "--data",
    multiple=True,
    required=True,
    type=click.Path(path_type=Path),
    help="Folder with train, validation and test, or one file, which is split; may be repeated.",
)
@click.option("--task", help="Task, if the model's family supports several.")
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="TEXT",
    help='Such as "2x faster", "4x smaller", "at most 20 MB"; may be repeated (default: fastest).',
)
@click.option(
    "--max-degradation",
    "max_degradations",
    multiple=True,
    metavar="TEXT",
    help='Largest loss, such as "bleu 0.5"; may be repeated (default: 1 point of the main metric).',
)
@click.option(
    "--time-limit",
    default="30m",
    show_default=True,
    metavar="TIME",
    help="Time for measuring and trials, such as 30m or 2h. A running trial is finished.",
)
@sample_options
@click.option(
    "--out", type=click.Path(path_type=Path), help="The search's folder (default: runs/NAME-shrink)."
)
@store_option
@click.option(
    "--plan", "only_plan", is_flag=True, help="Measure and show what would be tried; write nothing."
)
@click.option("--quiet", is_flag=True, help="Print only the result.")
def shrink(
    model: str,
    data: tuple[Path, ...],
    task: Any,
    columns: tuple[str, ...],
    time_limit: str,
    only_plan: bool,
    quiet: bool,
    source_language: str | None,
    target_language: str | None,
    **flags: Any,
) -> None:
    """Make MODEL (a folder or a hub id) smaller or faster, within a loss of quality and a time.

    Measures the model, writes a recipe with a search space, and searches it. The same command goes on after
    an interruption. Exits with 3 if the target cannot be met.
    """
    from smelt.pipeline.inspect.data_files import parse_columns
    from smelt.pipeline.search.report import exit_code, summary_text
    from smelt.pipeline.search.shrink import ShrinkOptions, plan_shrink, target_text
    from smelt.pipeline.search.shrink import shrink as run_shrink

    _require_task(task)
    column_names = parse_columns(columns).model_dump(exclude_unset=True)
    languages = (source_language, target_language)
    options = ShrinkOptions(
        time_limit_minutes=minutes_of(time_limit, "--time-limit"),
        task=task,
        columns=column_names,
        languages=languages,
        **flags,
    )

    explain = None if quiet else print_summary
    if only_plan:
        print_untrusted(str(plan_shrink(model, data, options, explain)).partition(": ")[2])
        return
    report, folder = run_shrink(model, data, options, explain)
    for line in [*summary_text(report, folder), target_text(report, options.targets)]:
        print_summary(line)
    sys.exit(exit_code(report))


def minutes_of(text: str, option: str) -> float:
    """Return the minutes of a time such as 90s, 30m or 2h, the value of `option`.

    Raises:
        InputError: it is not a time.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(s|m|min|h)", text.strip())
    if match is None or not float(match[1]):
        raise InputError(
            f"{option}: expected a time such as 90s, 30m or 2h, got {text!r}.", code="wrong-value"
        )
    return float(match[1]) * {"s": 1 / 60, "m": 1, "min": 1, "h": 60}[match[2]]


def _require_task(task: str | None) -> None:
    """Raise the error about an unknown task.

    Raises:
        InputError: `task` is none.
    """
    from smelt.core.errors import did_you_mean
    from smelt.data.tasks import ALL_TASKS

    if task is not None and task not in ALL_TASKS:
        task_names = ", ".join(ALL_TASKS)
        raise InputError(
            f"--task {task}: unknown task. Supported tasks: {task_names}.{did_you_mean(task, ALL_TASKS)}",
            code="unknown-task",
        )


def _format_list() -> str:
    """Return the list of formats with their summaries, for --help."""
    from smelt.api.package import PACKAGE_FORMATS

    width = max(map(len, PACKAGE_FORMATS))
    return "\b\n" + "\n".join(f"{name:{width}}  {form.summary}" for name, form in PACKAGE_FORMATS.items())


class _PackageCommand(click.Command):
    """A command whose help lists the formats, which are imported only then."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.epilog = f"Formats:\n\n{_format_list()}"
        super().format_help(ctx, formatter)


@click.command(cls=_PackageCommand, short_help="Write an artifact as a folder for deployment.")
@click.argument("artifact", type=FOLDER_TYPE)
@click.option(
    "--format",
    "format_",
    metavar="FORMAT",
    default="standalone",
    show_default=True,
    help="One of the formats below.",
)
@click.option("--out", metavar="FOLDER", help="The folder to write (default: NAME-FORMAT here).")
def package(artifact: Path, format_: str, out: str | None) -> None:
    """Write ARTIFACT as a self-contained folder for deployment.

    ARTIFACT is a folder such as runs/x/artifacts/onnx-int8. The package has a README.md with its scores and
    how to load it. If packaging fails, no folder is written.
    """
    from smelt.api.package import package_artifact, package_lines

    for line in package_lines(package_artifact(artifact, format_, out)):
        print_summary(line)


@click.command("tensorrt-check", short_help="Check an ONNX file for problems with TensorRT.")
@click.argument("path", metavar="FILE|ARTIFACT", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tensorrt_check(path: Path, as_json: bool) -> None:
    """Check FILE.onnx or ARTIFACT for what TensorRT rejects or computes differently.

    Needs neither TensorRT nor a GPU. Each problem is listed with its node, the reason and a fix. If TensorRT
    is installed and its builder works, its parser is run too. Exits with 1 if TensorRT would reject the
    graph, or build an engine with different results.
    """
    from smelt.export.tensorrt.preflight import check_tensorrt_graphs, describe_checks
    from smelt.export.tensorrt.preflight import checks_as_json as listed

    checks = check_tensorrt_graphs(path)
    if as_json:
        import json

        print_json(json.dumps(listed(checks), indent=1))
    else:
        print_untrusted(describe_checks(checks))
    if any(checked.rejected for checked in checks):
        sys.exit(1)


class _PredictCommand(click.Command):
    """A command whose errors explain how to pass texts that begin with a dash."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            message = f"{error.format_message()} Put texts that begin with a dash after --:"
            raise click.UsageError(f"{message} smelt predict ARTIFACT -- TEXT", ctx) from error


@click.command(cls=_PredictCommand, short_help="Run an artifact on texts, images, audio or arrays.")
@click.argument("artifact", type=FOLDER_TYPE)
@click.argument("text", nargs=-1)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Input file: a table, one text per line (.txt), or arrays (.npz, or a folder with one per sample).",
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
    help="Task custom: write the outputs to this file, or folder if --data is one, instead of printing.",
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
@click.option(
    "--top-k",
    type=click.IntRange(min=0),
    help="Sample among the K most likely tokens; 0: all. With a mask token and --json: print K tokens.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    help="Sample among the most likely tokens with this total probability.",
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Random seed for sampling (default: 0).")
@click.option("--threads", type=click.IntRange(min=1))
@click.option(
    "--workers",
    type=click.IntRange(1, 1024),
    help="Batches at the same time (default: in ONNX Runtime on the CPU, as many as the cores suffice for).",
)
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
    workers: int | None,
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
    from smelt.api.predict import Predictor, as_examples, fills_masks, read_examples

    for name in ("temperature", "top_k", "top_p", "seed"):
        if generation[name] is not None and not generation["do_sample"]:
            needed = "--json" if name == "top_k" and fills_masks(artifact) else "--sample"
            if needed == "--sample" or not as_json:
                raise click.UsageError(f"--{name.replace('_', '-')} needs {needed}.")
    if data is not None and text:
        raise click.UsageError("pass texts or --data, not both.")
    if columns and data is None:
        raise click.UsageError("--column needs --data.")
    from smelt.api.array_models import reads_arrays

    if reads_arrays(artifact):
        if workers is not None:
            raise click.UsageError("--workers is not for the task custom, whose batches run in turn.")
        _predict_arrays(artifact, data, out, as_json, threads, device, batch_size, bool(text or columns))
        return
    if out is not None:
        raise click.UsageError("--out is only for the task custom; other outputs are printed.")
    predictor = Predictor(artifact, generation, threads, device, batch_size, trust_engine, workers)
    if data is None:
        texts, name = (text, "text") if text else (_stdin_lines(sys.stdin), "standard input, line")
        examples = as_examples(texts, predictor.task, name)
    else:
        examples = read_examples(data, predictor.task, columns)
    _print_answers(predictor.run(examples), as_json)
    for warning in predictor.warnings:
        print_untrusted(f"warning: {warning}", err=True)


def _print_answers(answers: Iterable[ExampleOutput], as_json: bool) -> None:
    """Print answers as they come, until nobody reads them."""
    iterator = iter(answers)
    while True:
        with redirect_stdout(sys.stderr):  # code of the user may print
            answer = next(iterator, None)
        if answer is None:
            return
        if as_json:
            print_json(answer.json_line)
        else:
            print_result(answer.line)
        if reader_has_ended():
            return


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
        print_result("\n".join(prediction_lines(artifact, data, as_json, threads, device, batch_size, texts)))
        return
    if data is None or as_json:
        raise click.UsageError("--out needs --data FILE.npz and cannot be combined with --json.")
    count = predict_to_file(artifact, data, out, threads, device, batch_size)
    print_untrusted(f"Wrote the outputs of {count:,} samples to {out}.", err=True)


def _stdin_lines(stream: TextIO | None) -> list[str]:
    """Return the lines of `stream`, standard input; on a terminal, print a prompt first.

    Raises:
        InputError: it is closed, or is not valid text in the system's encoding.
    """
    if stream is None:
        raise InputError("standard input is closed. Pass texts, or use --data FILE.", code="closed-input")
    if stream.isatty():
        print_untrusted("Reading texts, one per line. End with Ctrl-D (on Windows: Ctrl-Z, Enter).", err=True)
    from smelt.api.predict import strip_lines

    try:
        return strip_lines(stream)
    except UnicodeDecodeError as error:
        raise InputError(
            f"standard input: not valid {error.encoding}. Convert it to UTF-8.", code="not-utf8"
        ) from error


def _store_option(command: Any) -> Any:
    return click.option(
        "--store",
        "folder",
        default="runs",
        show_default=True,
        type=click.Path(path_type=Path, file_okay=False),
        help="The store, or a folder with a .store in it.",
    )(command)


@click.group()
def store() -> None:
    """List, clean or check the stored artifacts and scores."""


@store.command("list")
@_store_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(folder: Path, as_json: bool) -> None:
    """List all artifacts: key, stage, date, size and the runs that use them."""
    from smelt.cli.store import find_store, store_list_json, store_list_text

    root = find_store(folder)
    if as_json:
        print_json(store_list_json(root))
    else:
        print_untrusted(store_list_text(root))


@store.command()
@_store_option
@click.option("--yes", is_flag=True, help="Remove; without this, only list.")
def clean(folder: Path, yes: bool) -> None:
    """Remove the artifacts and scores that no run uses.

    A run uses the artifacts that its folder links to. A run whose folder was
    moved or deleted uses nothing.
    """
    from smelt.cli.store import find_store, find_unused, remove_unused, store_clean_text

    root = find_store(folder)
    print_untrusted(store_clean_text(remove_unused(root) if yes else find_unused(root), removed=yes))


@store.command()
@_store_option
def check(folder: Path) -> None:
    """Compare every file with its hash; exit with 1 if one is damaged."""
    from smelt.cli.store import find_damaged_files, find_store, store_check_text

    root = find_store(folder)
    damaged_files = find_damaged_files(root)
    print_untrusted(store_check_text(root, damaged_files))
    sys.exit(1 if damaged_files else 0)
