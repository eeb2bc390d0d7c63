"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from smelt.commands.bench import bench
from smelt.commands.init import init
from smelt.commands.options import FOLDER, device, search, show
from smelt.commands.package import package
from smelt.commands.predict import predict
from smelt.commands.store import store
from smelt.commands.tensorrt_check import tensorrt_check
from smelt.core.child_process import SAFE_PATH
from smelt.core.scripts import TOKENIZERS


class _Commands(click.Group):
    """A group that explains smelt's own errors and says which known word a wrong one resembles."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error becomes its message and exit code, never a traceback."""
        from smelt.core.errors import UNNAMED, SmeltError, panics_explained

        try:
            with panics_explained():
                return super().invoke(ctx)
        except SmeltError as error:
            show(f"error[{error.code or UNNAMED}]: {error}", err=True)
            ctx.exit(error.exit_code)
        except click.NoSuchOption as error:
            from smelt.recipe.other_names import called

            known = [] if error.ctx is None else [o for p in error.ctx.command.params for o in p.opts]
            if hint := called(error.option_name, known):
                raise click.UsageError(f"{error.message}{hint}", error.ctx) from error
            raise
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise  # click's own ways out
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(130)
        except BrokenPipeError:  # the reader of a pipe went away: `smelt stages | head`
            sys.stdout = None
            ctx.exit(0)
        except Exception as error:
            from smelt.execute.failures import explain_command

            failure = explain_command(error, str(ctx.invoked_subcommand))
            show(f"error[{failure.code}]: {failure}", err=True)
            ctx.exit(1)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or name the nearest one."""
        from smelt.core.errors import nearest

        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise click.UsageError(error.message + nearest(args[0], self.commands), ctx) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(package_name="smelt")
def main() -> None:
    """Make trained models small and fast, one measured stage at a time.

    It takes text and image models, and any ONNX graph.
    Start with `smelt run quickstart`, which needs no data and no model.
    """


def program() -> None:
    """Be the program `smelt`, whose children, also those that libraries start, have a safe path."""
    os.environ[SAFE_PATH] = "1"
    main()


def _overrides(command: Any) -> Any:
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="NAME.KEY=VALUE",
        help="Change one setting of the recipe: small.energy=0.9, seed=3.",
    )(click.option("--until", metavar="STEP", help="Stop after this step (and what it needs).")(command))


@main.command(short_help="Run a recipe and write its report.")
@click.argument("recipe")
@_overrides
@click.option("--out", type=FOLDER, help="The run's folder (default: runs/NAME).")
@click.option("--store", type=FOLDER, help="Where artifacts are stored (default: .store next to the run).")
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
    "--limit", type=click.IntRange(min=1), metavar="N", help="Use N samples of every split, for a first try."
)
@click.option("--quiet", is_flag=True, help="Print the table at the end only.")
def run(
    recipe: str,
    overrides: tuple[str, ...],
    until: str | None,
    out: Path | None,
    store: Path | None,
    rebuild: tuple[str, ...],
    limit: int | None,
    quiet: bool,
) -> None:
    """Run RECIPE: a file, or the name of one that ships (quickstart)."""
    from smelt.execute.run import Options, run_plan
    from smelt.execute.run_result import summary_lines
    from smelt.planning.load import load_plan

    plan = load_plan(recipe, overrides, until)
    for warning in plan.warnings:
        show(f"warning: {warning}", err=True)
    result = run_plan(plan, Options(out, store, frozenset(rebuild), limit, quiet))
    for line in summary_lines(result):
        show(line)
    sys.exit(result.exit_code)


@main.command(short_help="Check a recipe and show what it would do.")
@click.argument("recipe")
@_overrides
def plan(recipe: str, overrides: tuple[str, ...], until: str | None) -> None:
    """Check RECIPE and show what it would do, without doing it.

    Exits with 2 if the recipe has a mistake, or a step cannot run on this machine.
    """
    from smelt.core.errors import InputError
    from smelt.planning.load import load_plan

    made = load_plan(recipe, overrides, until)
    show(str(made))
    if made.blocked:
        sys.exit(InputError.exit_code)


@main.command()
@click.argument("name", required=False)
def stages(name: str | None) -> None:
    """List the stages, or explain the stage NAME and its settings."""
    from smelt.commands.stage_help import describe_stage, list_stages

    click.echo(list_stages() if name is None else describe_stage(name))


@main.command("eval", short_help="Score an artifact on data of your own.")
@click.argument("artifact", type=FOLDER)
@click.option("--data", required=True, help="Rows to score on: a file or a hub id.")
@click.option(
    "--metric", "metrics", multiple=True, help="A metric; may be repeated (default: those of the task)."
)
@click.option(
    "--column", "columns", multiple=True, metavar="ROLE=NAME", help="Where a column has another name."
)
@click.option("--batch-size", default=32, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--window",
    type=click.IntRange(min=2),
    metavar="N",
    help="Tokens a language model sees (default: as in its run).",
)
@click.option("--stride", type=click.IntRange(min=1), metavar="N", help="Tokens from window to window.")
@click.option(
    "--baseline", type=FOLDER, help="An artifact whose vectors or arrays this one's should agree with."
)
@click.option(
    "--tokenize",
    type=click.Choice(TOKENIZERS),
    help="How BLEU splits texts (default: by language).",
)
@search
@click.option("--threads", type=click.IntRange(min=1))
@device
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Use N rows, spread over the file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def evaluate(artifact: Path, as_json: bool, **options: Any) -> None:
    """Score ARTIFACT (a folder of a run's artifacts) on data of your own."""
    from smelt.use.eval import evaluate_artifact, quality_lines

    scores = evaluate_artifact(artifact, **options, say=lambda text: show(text, err=True))
    if as_json:
        import json

        click.echo(json.dumps(scores, indent=1))
    else:
        click.echo("\n".join(quality_lines(scores)))


@main.command(short_help="Show the table of a run, draw its pages anew.")
@click.argument("run_folder", metavar="RUN", type=FOLDER)
def report(run_folder: Path) -> None:
    """Show the table of a finished RUN, and draw its report.md and report.html anew."""
    from smelt.use.report import redraw_report

    show(redraw_report(run_folder))


@main.command(short_help="Tell what is installed and what works here.")
def doctor() -> None:
    """Tell what is installed, which runtimes and devices work, and how to get the missing ones."""
    from smelt.commands.doctor import describe, diagnose

    click.echo(describe(diagnose()))


main.add_command(bench)
main.add_command(init)
main.add_command(package)
main.add_command(predict)
main.add_command(store)
main.add_command(tensorrt_check)
