"""The command `smelt package`."""

from __future__ import annotations

from pathlib import Path

import click

from smelt.commands.options import FOLDER, show


def _formats() -> str:
    """Return the formats, each with its summary, for the help."""
    from smelt.export.package.registry import FORMS

    width = max(map(len, FORMS))
    return "\b\n" + "\n".join(f"{name:{width}}  {form.summary}" for name, form in FORMS.items())


class _Package(click.Command):
    """A command whose help lists the formats, which are imported only then."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.epilog = f"Formats:\n\n{_formats()}"
        super().format_help(ctx, formatter)


@click.command(cls=_Package, short_help="Write an artifact as a folder to ship.")
@click.argument("artifact", type=FOLDER)
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
    """Write ARTIFACT as a folder of real files that others can open.

    ARTIFACT is a folder such as runs/x/artifacts/onnx-int8. The package is complete or absent, and has a
    README.md with its scores and how to load it.
    """
    from smelt.use.package import package_artifact, package_lines

    for line in package_lines(package_artifact(artifact, format_, out)):
        show(line)
