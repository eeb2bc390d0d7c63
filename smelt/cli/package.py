"""The command `smelt package`."""

from __future__ import annotations

from pathlib import Path

import click

from smelt.cli.options import FOLDER_TYPE, print_untrusted


def _format_list() -> str:
    """Return the list of formats with their summaries, for --help."""
    from smelt.export.package.registry import PACKAGE_FORMATS

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
        print_untrusted(line)
