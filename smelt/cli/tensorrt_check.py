"""The command `smelt tensorrt-check`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from smelt.cli.options import print_untrusted


@click.command("tensorrt-check", short_help="Check an ONNX file for problems with TensorRT.")
@click.argument("path", metavar="FILE|ARTIFACT", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tensorrt_check(path: Path, as_json: bool) -> None:
    """Check FILE.onnx or ARTIFACT for what TensorRT rejects or computes differently.

    Needs neither TensorRT nor a GPU. Each problem is listed with its node, the reason and a fix. If TensorRT
    is installed and its builder works, its parser is run too. Exits with 1 if TensorRT would reject the
    graph, or build an engine with different results.
    """
    from smelt.api.tensorrt_compatibility import check_tensorrt_graphs, describe_checks
    from smelt.api.tensorrt_compatibility import checks_as_json as listed

    checks = check_tensorrt_graphs(path)
    if as_json:
        import json

        click.echo(json.dumps(listed(checks), indent=1))
    else:
        print_untrusted(describe_checks(checks))
    if any(checked.rejected for checked in checks):
        sys.exit(1)
