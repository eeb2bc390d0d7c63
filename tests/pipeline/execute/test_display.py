"""What a person sees: escaped where strangers wrote it, and a log that may end before the run does."""

import io
import os
from pathlib import Path

import pytest

from smelt.pipeline.execute.display import Display

pytestmark = pytest.mark.quick


def test_lines_go_to_the_stream_and_with_their_time_to_the_log(tmp_path):
    stream = io.StringIO()
    display = Display(tmp_path / "log.txt", stream=stream)
    display.print_line("prune: \x1b[2Jdone")
    display.log_line("only here")
    display.close()
    assert stream.getvalue() == "prune: \\x1b[2Jdone\n"
    logged = (tmp_path / "log.txt").read_text()
    assert "prune: \\x1b[2Jdone\n" in logged
    assert logged.endswith("    only here\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a disk that is always full")
def test_a_full_disk_ends_the_log_and_not_the_run():
    stream = io.StringIO()
    display = Display(Path("/dev/full"), stream=stream)
    display.print_line("one")
    display.print_line("two")
    display.close()
    first, warning, second = stream.getvalue().splitlines()
    assert (first, second) == ("one", "two")
    assert all(value in warning for value in ("warning: /dev/full: ", "No space left on device"))
