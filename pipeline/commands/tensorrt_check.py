"""The command `smelt tensorrt-check`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from smelt.commands.options import show


@click.command("tensorrt-check", short_help="Say what TensorRT would reject of an ONNX file.")
@click.argument("path", metavar="FILE|ARTIFACT", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tensorrt_check(path: Path, as_json: bool) -> None:
    """Say what TensorRT would reject of FILE.onnx or ARTIFACT, or silently do otherwise.

    Needs neither TensorRT nor a GPU. Each finding comes with its node, the reason and what to do. Where
    TensorRT is installed and can make a builder, its own parser is asked too. Exits with 1 where something
    would be rejected, or built into an engine that computes something else.
    """
    from smelt.use.tensorrt_check import as_json as listed
    from smelt.use.tensorrt_check import check_graphs, describe_checks

    checks = check_graphs(path)
    if as_json:
        import json

        click.echo(json.dumps(listed(checks), indent=1))
    else:
        show(describe_checks(checks))
    if any(checked.rejected for checked in checks):
        sys.exit(1)
