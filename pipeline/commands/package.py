"""The command `smelt package`."""

from __future__ import annotations

from pathlib import Path

import click

from smelt.commands.options import FOLDER, show


def _forms() -> str:
    """Return the forms with what each is, for the help."""
    from smelt.export.package.registry import FORMS

    width = max(map(len, FORMS))
    return "\b\n" + "\n".join(f"{name:{width}}  {form.summary}" for name, form in FORMS.items())


class _Package(click.Command):
    """Its help lists the forms, which are looked up only then."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.epilog = f"Forms:\n\n{_forms()}"
        super().format_help(ctx, formatter)


@click.command(cls=_Package, short_help="Write an artifact as a folder to ship.")
@click.argument("artifact", type=FOLDER)
@click.option("--for", "form", metavar="FORM", default="standalone", show_default=True, help="What for.")
@click.option("--out", metavar="FOLDER", help="The folder to write (default: NAME-FORM here).")
def package(artifact: Path, form: str, out: str | None) -> None:
    """Write ARTIFACT as a folder of real files that others can open.

    ARTIFACT is a folder such as runs/x/artifacts/onnx-int8. The package is complete or absent, and has a
    README.md that says what it is, how good, and how it is loaded.
    """
    from smelt.use.package import package_artifact, package_lines

    for line in package_lines(package_artifact(artifact, form, out)):
        show(line)
