"""The command line. Heavy dependencies are imported only by the commands that need them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import click

from smelt.cli.bench import bench
from smelt.cli.commands import (
    FILE_TYPE,
    FOLDER_TYPE,
    device_options,
    executor_option,
    generation_options,
    init,
    minutes_of,
    package,
    predict,
    shrink,
    store,
    store_option,
    tensorrt_check,
)
from smelt.cli.output import print_bytes, print_json, print_summary, print_untrusted, run_program
from smelt.cli.stage_help import describe_stage, list_stages
from smelt.core.errors import InputError, did_you_mean
from smelt.core.system import SAFE_PATH_VARIABLE
from smelt.data.bleu_tokenizer import BLEU_TOKENIZERS


def _single_value(ctx: click.Context, param: click.Parameter, values: tuple[Any, ...]) -> Any:
    """Return the value of an option declared `multiple` that may be set only once; None if it is not set.

    Raises:
        InputError: `repeated-option`.
    """
    if len(values) > 1:
        option = param.opts[0]
        raise InputError(
            f"{option} is set {len(values)} times: {', '.join(map(str, values))}. Set it once.",
            code="repeated-option",
            setting=option,
        )
    return values[0] if values else None


class _CommandGroup(click.Group):
    """A command group that prints errors as messages and suggests names for unknown commands and options."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; print errors as messages, without a traceback, and set the exit code."""
        from smelt.core.system import sigterm_as_error

        with sigterm_as_error():
            return self._invoke(ctx)

    def _invoke(self, ctx: click.Context) -> Any:
        from smelt.core.errors import DEFAULT_CODE, SmeltError, rust_panics_as_errors
        from smelt.core.system import interrupted_exit_code

        try:
            with rust_panics_as_errors():
                return super().invoke(ctx)
        except SmeltError as error:
            print_untrusted(f"error[{error.code or DEFAULT_CODE}]: {error}", err=True)
            ctx.exit(error.exit_code)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise  # handled by click
        except KeyboardInterrupt:
            print_untrusted("Interrupted.", err=True)
            ctx.exit(interrupted_exit_code())
        except Exception as error:
            from smelt.pipeline.execute.display import explain_command

            failure = explain_command(error, str(ctx.invoked_subcommand))
            print_untrusted(f"error[{failure.code}]: {failure}", err=True)
            ctx.exit(1)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command, or raise an error that suggests the closest name."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise click.UsageError(error.message + did_you_mean(args[0], self.commands), ctx) from error


def _print_version(ctx: click.Context, _: click.Parameter, is_given: bool) -> None:
    if not is_given or ctx.resilient_parsing:
        return
    import smelt

    commit = _checkout_commit(Path(smelt.__file__).resolve().parents[1])
    print_untrusted(f"smelt, version {smelt.__version__}{f' (commit {commit})' if commit else ''}")
    ctx.exit()


def _checkout_commit(root: Path) -> str | None:
    """Return the short hash of the checkout in `root`; None if it is none, or without git."""
    if not (root / ".git").exists() or not (root / "pyproject.toml").is_file():
        return None
    command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return completed.stdout.strip() or None


@click.group(
    cls=_CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80}
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
    help="Show the version and exit; in a checkout, with its commit.",
)  # fmt: skip
def main() -> None:
    """Compress trained models and export them, with every step measured.

    Input: models of text, images or speech, or any ONNX model.
    Start with `smelt run quickstart`; it needs no data and no model.
    """


def program() -> None:
    """Run the program `smelt`; child processes, also those of libraries, get a safe import path."""
    os.environ[SAFE_PATH_VARIABLE] = "1"
    run_program(main)


def _override_options(command: Any) -> Any:
    command = click.option(
        "--num-processes",
        type=click.IntRange(min=1),
        metavar="N",
        help="Processes of each training stage (launch.num_processes).",
    )(command)
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="NAME.KEY=VALUE",
        help="Change one setting of the recipe: small.energy=0.9, seed=3.",
    )(
        click.option("--until", metavar="STEP", help="Run only this step and the steps that it needs.")(
            command
        )
    )


def _with_processes(overrides: tuple[str, ...], count: int | None) -> tuple[str, ...]:
    """Return the settings of `--set` with those of `--num-processes`."""
    return overrides if count is None else (*overrides, f"launch.num_processes={count}")


@main.command(short_help="Run a recipe and write its report.")
@click.argument("recipe")
@_override_options
@click.option("--out", type=FOLDER_TYPE, help="The run's folder (default: runs/NAME).")
@store_option
@executor_option
@click.option(
    "--rebuild",
    "rebuild",
    multiple=True,
    is_flag=False,
    flag_value="*",
    metavar="[STEP]",
    help="Build this step again, or all steps.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="Use at most N samples of every split, for a first try.",
)
@click.option(
    "--push-checkpoints", is_flag=True, help="Copy checkpoints to the bucket of --store, for other machines."
)
@click.option("--quiet", is_flag=True, help="Print only the table at the end.")
def run(
    recipe: str,
    overrides: tuple[str, ...],
    until: str | None,
    out: Path | None,
    store: Path | str | None,
    executor: str | None,
    rebuild: tuple[str, ...],
    limit: int | None,
    num_processes: int | None,
    push_checkpoints: bool,
    quiet: bool,
) -> None:
    """Run RECIPE: a file, or the name of an included recipe (quickstart).

    Started by torchrun or srun, the processes train its stages together.
    """
    from smelt.pipeline.execute.run import RunOptions, run_plan
    from smelt.pipeline.execute.run_result import summary_lines
    from smelt.pipeline.execute.training_processes import serve_training, use_all_cores
    from smelt.pipeline.plan.load_plan import load_plan
    from smelt.training.processes import external_rank

    use_all_cores()
    plan = load_plan(recipe, _with_processes(overrides, num_processes), until)
    if external_rank():
        serve_training(plan)
        return
    for warning in plan.warnings:
        print_untrusted(f"warning: {warning}", err=True)
    options = RunOptions(
        out, store, frozenset(rebuild), limit, quiet, executor=executor, push_checkpoints=push_checkpoints
    )
    result = run_plan(plan, options)
    for line in summary_lines(result):
        print_summary(line)
    sys.exit(result.exit_code)


@main.command(short_help="Check a recipe and show its plan.")
@click.argument("recipe")
@_override_options
@click.option("--out", type=FOLDER_TYPE, help="The folder of the run (default: runs/NAME).")
@store_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    recipe: str,
    overrides: tuple[str, ...],
    until: str | None,
    num_processes: int | None,
    as_json: bool,
    **places: Any,
) -> None:
    """Check RECIPE and show its plan with costs, without running it.

    Memory and disk of each step are shown, and the time if an earlier run on this machine measured one.

    Exits with 2 if the recipe has errors, or if a step cannot run on this machine or cannot fit.
    """
    from smelt.pipeline.execute.run_costs import cost_lines, plan_costs, plan_json
    from smelt.pipeline.plan.costs import require_fitting
    from smelt.pipeline.plan.load_plan import load_plan
    from smelt.training.processes import require_gpus

    loaded = load_plan(recipe, _with_processes(overrides, num_processes), until)
    costs = plan_costs(loaded, **places)
    if as_json:
        print_json(json.dumps(plan_json(loaded, costs), indent=1))
    else:
        print_untrusted("\n".join([str(loaded), "", *cost_lines(costs)]))
    require_gpus(loaded.recipe.launch, loaded.recipe.device)
    require_fitting(costs.messages)
    if loaded.blocked_steps:
        sys.exit(InputError.exit_code)


@main.command(short_help="Search the settings of a recipe for a goal.")
@click.argument("recipe")
@click.option(
    "--set", "overrides", multiple=True, metavar="NAME.KEY=VALUE", help="Change one setting of the recipe."
)
@click.option("--trials", type=click.IntRange(min=1), metavar="N", help="Trials at most (default: 50).")
@click.option("--time-limit", metavar="TIME", help="Time limit, such as 90s, 30m or 2h.")
@click.option(
    "--sampler", type=click.Choice(("tpe", "nsga2", "random", "grid")), help="How points are chosen."
)
@click.option("--out", type=FOLDER_TYPE, help="The search's folder (default: runs/NAME-search).")
@store_option
@executor_option
@click.option("--storage", metavar="URL", help="Database of the study, such as sqlite:///study.db.")
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="Use at most N samples of every split."
)
@click.option("--plan", "only_plan", is_flag=True, help="Check the space and show it, without running it.")
@click.option("--quiet", is_flag=True, help="Print only the result.")
def search(
    recipe: str,
    overrides: tuple[str, ...],
    time_limit: str | None,
    only_plan: bool,
    quiet: bool,
    **flags: Any,
) -> None:
    """Search the space of RECIPE: a recipe with `{search: ...}` in its settings and a key `search`.

    An interrupted search goes on with the same command; further workers may run it at the same time. Exits
    with 3 if no trial meets the constraints, with 1 if no winner could be scored on test.
    """
    from smelt.pipeline.search.report import exit_code, finish_search, summary_text
    from smelt.pipeline.search.space import read_space
    from smelt.pipeline.search.study import Search, SearchOptions

    limit = None if time_limit is None else minutes_of(time_limit, "--time-limit")
    job = Search(read_space(recipe, overrides), SearchOptions(time_limit_minutes=limit, **flags))
    job.check()
    if only_plan:
        print_untrusted(str(job.space))
        return
    outcome = job.run(None if quiet else print_summary)
    report = finish_search(job, outcome)
    for line in summary_text(report, job.folder):
        print_summary(line)
    sys.exit(exit_code(report))


@main.command()
@click.argument("name", required=False)
def stages(name: str | None) -> None:
    """List the stages, or describe one with its settings."""
    print_untrusted(list_stages() if name is None else describe_stage(name))


@main.command("eval", short_help="Score an artifact on your data.")
@click.argument("artifact", type=FOLDER_TYPE)
@click.option("--data", required=True, help="Samples to score: a file or a hub id.")
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    help="A metric as in score.quality, such as 'allclose: {atol: 0.01}' or my_metrics:accuracy; may be"
    " repeated (default: those of the task).",
)
@click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="ROLE=NAME",
    help="Name of a column, such as label=stars; may be repeated.",
)
@click.option("--batch-size", default=32, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--window",
    type=click.IntRange(min=2),
    metavar="N",
    help="Language models: tokens per window (default: as in the run).",
)
@click.option(
    "--stride", type=click.IntRange(min=1), metavar="N", help="Language models: tokens between windows."
)
@click.option(
    "--baseline",
    type=FOLDER_TYPE,
    help="Original model to compare with: for agreement; required for ONNX graphs of arrays.",
)
@click.option(
    "--tokenize",
    type=click.Choice(BLEU_TOKENIZERS),
    help="BLEU's tokenizer (default: by language).",
)
@generation_options
@click.option("--threads", type=click.IntRange(min=1))
@device_options
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="Use at most N samples, spread over the file."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def evaluate(artifact: Path, as_json: bool, **options: Any) -> None:
    """Score ARTIFACT (such as runs/NAME/artifacts/STEP) on your data."""
    from smelt.api.evaluate import EvaluationOptions, evaluate_artifact, quality_lines

    data = options.pop("data")
    with redirect_stdout(sys.stderr):  # code of the user may print
        scores = evaluate_artifact(
            artifact, data, EvaluationOptions(**options), report=lambda text: print_untrusted(text, err=True)
        )
    if as_json:
        print_json(json.dumps(scores, indent=1))
    else:
        print_untrusted("\n".join(quality_lines(scores)))


@main.command(short_help="Score texts that another program wrote.")
@click.option(
    "--hypotheses",
    type=FILE_TYPE,
    multiple=True,
    required=True,
    callback=_single_value,
    help="Texts to score, one per line.",
)
@click.option(
    "--references",
    type=FILE_TYPE,
    multiple=True,
    required=True,
    help="Reference texts, one per line; may be repeated.",
)
@click.option(
    "--baseline",
    type=FILE_TYPE,
    multiple=True,
    callback=_single_value,
    help="Texts of a baseline, to compare with in pairs.",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    help="A metric of texts as in score.quality, such as rougeL or 'bleu: {tokenize: intl}'; may be repeated"
    " (default: bleu, chrf).",
)
@click.option(
    "--language",
    metavar="CODE",
    help="Language of the references, such as ja, ko, th or zh, for BLEU's tokenizer (default: by their"
    " script).",
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "cpu", "cuda"]),
    help="Device of metrics with a model.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def score(as_json: bool, **options: Any) -> None:
    """Score texts that another program wrote, in files with one text per line."""
    from smelt.api.score_files import score_files, score_lines

    scores = score_files(**options)
    if as_json:
        print_json(json.dumps(scores, indent=1))
    else:
        print_untrusted("\n".join(score_lines(scores)))


@main.command(short_help="Show a run's table and write its report again.")
@click.argument("run_folder", metavar="RUN", type=FOLDER_TYPE)
@click.option(
    "--format",
    "as_format",
    type=click.Choice(("html", "md", "csv", "json", "svg", "png")),
    help="Print the report, or its chart (svg, png), in this format instead; writes nothing.",
)
def report(run_folder: Path, as_format: str | None) -> None:
    """Show the table of a finished RUN and write its pages, report.csv and charts again."""
    from smelt.api.recipes import redraw_report, report_chart, report_text

    if as_format == "png" and sys.stdout.isatty():
        raise click.UsageError("A terminal cannot show a PNG. Redirect it: --format png > report.png")
    if as_format in ("svg", "png"):
        print_bytes(report_chart(run_folder, as_format))
    elif as_format is None:
        print_untrusted(redraw_report(run_folder))
    elif sys.stdout.isatty():
        print_untrusted(report_text(run_folder, as_format))
    else:  # the same file as in the folder, whatever the terminal's encoding is
        print_bytes(f"{report_text(run_folder, as_format)}\n".encode())


@main.command(short_help="Compare several runs of one task.")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=FOLDER_TYPE)
@click.option(
    "--fail-if",
    "rules",
    multiple=True,
    metavar="RULE",
    help="Exit with 3 if a later run breaks it or was not judged: 'bleu drops 0.5', 'size rises 5% at onnx'.",
)
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Also write an HTML page.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the chart of quality against latency, to a .svg or .png file.",
)
@click.option("--markdown", is_flag=True, help="Print Markdown with all metrics.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare(
    runs: tuple[Path, ...],
    rules: tuple[str, ...],
    html: Path | None,
    plot: Path | None,
    markdown: bool,
    as_json: bool,
) -> None:
    """Compare the steps of several runs (folders) with those of the first one.

    Scores are compared in pairs if the runs scored the same samples.
    """
    from smelt.core.files import write_atomically
    from smelt.evaluate.report import comparison as comparing
    from smelt.evaluate.report.fail_rules import Regression, check_rules

    comparison = comparing.compare_runs(comparing.read_runs(runs))
    findings = check_rules(comparison, rules)
    regressions = [finding for finding in findings if isinstance(finding, Regression)]
    not_judged = [finding for finding in findings if not isinstance(finding, Regression)]
    if html is not None:
        write_atomically(html, comparing.comparison_html(comparison))
    if plot is not None:
        write_atomically(plot, comparing.comparison_plot(comparison, plot))
    if as_json:
        checked = {
            "regressions": [vars(finding) for finding in regressions],
            "not_judged": [vars(finding) for finding in not_judged],
        }
        print_json(json.dumps(comparison | checked, indent=1))
    elif markdown:
        print_untrusted(comparing.comparison_markdown(comparison))
    else:
        print_untrusted(comparing.comparison_text(comparison))
    for regression in regressions:
        print_untrusted(f"regression: {regression}", err=True)
    for unjudged in not_judged:
        print_untrusted(f"not judged: {unjudged}", err=True)
    sys.exit(3 if findings else 0)


@main.command(short_help="Check the installation and this machine.")
def doctor() -> None:
    """Check which packages, runtimes and devices work, and how to install missing ones."""
    from smelt.cli.doctor import format_check_results, run_checks

    print_untrusted(format_check_results(run_checks()))


main.add_command(bench)
main.add_command(init)
main.add_command(package)
main.add_command(predict)
main.add_command(shrink)
main.add_command(store)
main.add_command(tensorrt_check)
