"""`smelt report`: the report of a finished run, drawn again."""

from __future__ import annotations

from pathlib import Path

from smelt.evaluate.report.table import table
from smelt.execute.run_result import Report, write_report


def redraw_report(folder: Path) -> str:
    """Draw report.md and report.html of the run in `folder` from its report.json; return the table.

    Raises:
        InputError: there is no report, or not one that this version of smelt reads.
    """
    report = Report.read(folder).data
    write_report(folder, report)
    return f"{table(report)}\n\nReport: {folder / 'report.html'}"
