"""Write the report of a finished run again, for `smelt report`."""

from __future__ import annotations

from pathlib import Path

from smelt.evaluate.report.terminal_table import render_table
from smelt.execute.run_result import Report, write_report


def redraw_report(folder: Path) -> str:
    """Write report.md and report.html of the run in `folder` from its report.json; return the table.

    Raises:
        InputError: there is no report, or this version of smelt cannot read it.
    """
    report = Report.read(folder).data
    write_report(folder, report)
    return f"{render_table(report)}\n\nReport: {folder / 'report.html'}"
