"""What a person sees: escaped where strangers wrote it, and a log that may end before the run does."""

import contextlib
import io
import os
import re
import sys
from pathlib import Path

import pytest

from smelt.pipeline.execute import display as module
from smelt.pipeline.execute.display import Display

pytestmark = pytest.mark.quick


def test_printed_lines_go_to_stream_and_log_with_time(tmp_path):
    stream = io.StringIO()
    display = Display(tmp_path / "log.txt", stream=stream)
    display.print_line("prune: \x1b[2Jdone")
    display.log_line("only here")
    display.close()
    assert stream.getvalue() == "prune: \\x1b[2Jdone\n"
    log = (tmp_path / "log.txt").read_text()
    assert "prune: \\x1b[2Jdone\n" in log
    assert log.endswith("    only here\n")


def test_search_trial_prints_brief_lines_with_label(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PLAIN_LINE_SECONDS", 0.0)
    stream = io.StringIO()
    display = Display(tmp_path / "log.txt", stream=stream, label="trial 3")
    display.print_line("model: from the store")
    display.start_work("prune")
    display.progress(1, 4)
    display.print_line("prune: 12 s", brief=True)
    display.close()
    progress, step = stream.getvalue().splitlines()
    assert progress.startswith("  trial 3: prune: 1/4")
    assert step == "trial 3: prune: 12 s"
    assert "model: from the store\n" in (tmp_path / "log.txt").read_text()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a disk that is always full")
def test_full_disk_ends_log_but_not_run():
    stream = io.StringIO()
    display = Display(Path("/dev/full"), stream=stream)
    display.print_line("one")
    display.print_line("two")
    display.close()
    first, warning, second = stream.getvalue().splitlines()
    assert (first, second) == ("one", "two")
    assert all(value in warning for value in ("warning: /dev/full: ", "No space left on device"))


def test_remaining_time_starts_at_first_finished_unit(monkeypatch):
    """What comes before it, such as an hour of waiting for a lock, is no measure of the rest."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    display = Display(stream=stream)
    display.start_work("distill")
    for seconds, *update in [
        *((3600, 0, 100), (600, 1, 100), (40, 3, 100), (40, 5, 100)),
        *((40, 10, 50), (40, 20, 50)),  # another part of the work
    ]:
        now[0] += seconds
        display.progress(*update)
    remaining_times = [re.findall(r", (.*) left", line) for line in stream.getvalue().splitlines()]
    assert remaining_times == [[], [], ["32 min 20 s"], ["31 min 40 s"], [], ["2 min 0 s"]]


def _closed_stream():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("make_stream", [
    lambda: None,  # sys.stderr of a process that was started without one
    _closed_stream,
    pytest.param(lambda: os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"),
        marks=pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")),
], ids=["none", "closed", "full"])  # fmt: skip
def test_unprintable_lines_are_logged(make_stream, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_PLAIN_LINE_SECONDS", 0.0)
    stream = make_stream()
    monkeypatch.setattr(sys, "stderr", stream)
    display = Display(tmp_path / "log.txt")
    display.start_work("prune")
    display.progress(1, 4)
    display.print_line("prune: done")
    display.close()
    assert (tmp_path / "log.txt").read_text().endswith("prune: done\n")
    with contextlib.suppress(OSError, AttributeError):
        stream.close()


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def progress(monkeypatch):
    """Return what a display writes to a stream while it shows progress, and then a line."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(module, "_REDRAW_SECONDS", 0.0)
    monkeypatch.setattr(module, "_PLAIN_LINE_SECONDS", 0.0)

    def show(stream):
        display = Display(stream=stream)
        display.start_work("prune, [b]scoring[/b]")
        for done in range(3):
            display.progress(done, 40, "layers.3.\x1b[2Jself_attention.projection.and.more")
        display.print_line("prune: done")
        display.close()
        return stream.getvalue()

    return show


def test_terminal_progress_bar_uses_one_line_and_is_erased(progress):
    output = progress(Terminal())
    *frames, last = (
        re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", part) for part in re.split(r"[\r\n]+", output.strip())
    )
    bars = [line for line in frames if line]
    assert all(" prune, [b]scoring[/b] " in line and len(line) == 80 for line in bars)
    assert {re.search(r"(\d+)/40", line)[1] for line in bars} == {"0", "1", "2"}
    assert "\x1b[2J" not in output
    assert "\r\x1b[1A\x1b[2K" in output  # the bar is erased before the line
    assert last == "prune: done"
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")  # the cursor is visible again


@pytest.mark.parametrize(("stream", "variables"), [
    (io.StringIO, {"FORCE_COLOR": "1"}), (Terminal, {"CI": "true"}), (Terminal, {"TERM": "dumb"}),
], ids=["pipe", "CI", "dumb terminal"])  # fmt: skip
def test_progress_without_terminal_is_plain_lines(progress, monkeypatch, stream, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    lines = progress(stream()).splitlines()
    assert "\x1b" not in "".join(lines)
    assert len(lines) == 4
    assert all("prune" in line and f"{done}/40" in line for done, line in enumerate(lines[:3]))


def test_no_color_removes_color_from_progress_bar(progress, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[3\d", progress(Terminal()))
