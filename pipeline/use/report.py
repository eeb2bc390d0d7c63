"""`smelt report`: the report of a finished run, drawn again."""

from __future__ import annotations

from pathlib import Path

from smelt.core.errors import InputError
from smelt.core.files import load_json
from smelt.evaluate.report.schema import validate_report
from smelt.evaluate.report.table import table
from smelt.execute.run_result import write_report


def redraw_report(folder: Path) -> str:
    """Draw report.md and report.html of the run in `folder` from its report.json; return the table.

    Raises:
        InputError: there is no report, or not one that this version of smelt reads.
    """
    path = folder / "report.json"
    if not path.is_file():
        raise InputError(
            f"{path}: no such file. Give the folder of a run, such as runs/quickstart.",
            code="missing-file",
            file=str(path),
        )
    try:
        report = load_json(path)
    except ValueError as error:
        raise InputError(f"{path}: broken JSON: {error}", code="invalid-json", file=str(path)) from error
    validate_report(report)
    write_report(folder, report)
    return f"{table(report)}\n\nReport: {folder / 'report.html'}"
