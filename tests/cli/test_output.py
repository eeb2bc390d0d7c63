"""Standard streams that are closed, full, without a reader, or in an encoding without smelt's characters."""

import io
import os
import subprocess
import sys

import pytest

from smelt.cli.output import (
    OutputError,
    open_standard_streams,
    print_result,
    print_summary,
    print_untrusted,
    reader_has_ended,
)

needs_full_device = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
needs_shell = pytest.mark.skipif(os.name == "nt", reason="descriptors are closed by a POSIX shell")


def run_in_shell(redirection, *arguments, **variables):
    """Return the finished process of this Python with `arguments` and the shell's `redirection`."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        check=False,
    )


def full_device():
    return os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")


def pipe_without_reader():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.fixture
def replace_streams(monkeypatch):
    """Let the program open its standard streams over others."""

    def replace(output, errors):
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr(sys, "stderr", errors)
        open_standard_streams()

    return replace


@needs_shell
@pytest.mark.parametrize("redirection", [">&-", pytest.param(">/dev/full", marks=needs_full_device)])
@pytest.mark.parametrize("option", ["--version", "--help"])
def test_unprintable_results_fail_with_plain_message(redirection, option):
    done = run_in_shell(redirection, "-m", "smelt", option)
    assert done.returncode == 1
    message = done.stderr.decode()
    assert message.startswith("error[unwritable-output]: standard output: ")
    assert len(message.splitlines()) == 1


def test_results_without_reader_are_dropped_and_command_continues(replace_streams):
    replace_streams(pipe_without_reader(), io.TextIOWrapper(io.BytesIO()))
    assert not reader_has_ended()
    print_result("first")
    assert reader_has_ended()
    print_result("second")  # so that the exit code is that of the command, such as of a failed gate


@needs_full_device
@pytest.mark.parametrize("stream", [full_device, pipe_without_reader])
def test_unprintable_messages_are_dropped(replace_streams, stream):
    output = io.TextIOWrapper(io.BytesIO())
    replace_streams(output, stream())
    print_untrusted("warning", err=True)
    print("progress of a library", file=sys.stderr, flush=True)
    print_result("result")
    assert output.buffer.getvalue() == b"result\n"


@needs_full_device
def test_unprintable_summary_is_warning(replace_streams):
    errors = io.TextIOWrapper(io.BytesIO())
    replace_streams(full_device(), errors)
    print_summary("one")
    print_summary("two")
    [warning] = errors.buffer.getvalue().decode().splitlines()
    assert warning.startswith("warning: standard output: ")


@needs_full_device
def test_unprintable_result_is_one_error(replace_streams):
    replace_streams(full_device(), io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(OutputError):
        print_result("one")
    sys.stdout.flush()  # as Python does at its exit


@needs_shell
@pytest.mark.parametrize("redirection", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_stream_number_is_not_reused(redirection, tmp_path):
    """What a library writes to standard error would else go into the weights that are being written."""
    path = tmp_path / "weights"
    code = (
        "import os, sys; from smelt.cli.output import open_standard_streams; open_standard_streams()\n"
        f"with open({str(path)!r}, 'w') as file:\n"
        "    os.write(2, b'warning of a library')\n"
        "    print('message', file=sys.stderr)\n"
        "    file.write(str(file.fileno()))"
    )
    done = run_in_shell(redirection, "-c", code)
    assert done.returncode == 0, done.stderr
    assert int(path.read_text()) > 2


@pytest.mark.parametrize(("encoding", "expected"), [
    ("utf-8", "37 ± 1 × 2 – 中"), ("latin-1", "37 ± 1 × 2 - \\u4e2d"), ("cp1252", "37 ± 1 × 2 – \\u4e2d"),
    ("ascii", "37 +- 1 x 2 - \\u4e2d"),
])  # fmt: skip
def test_unencodable_characters_have_ascii_forms(encoding, expected, replace_streams):
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    replace_streams(output, io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    print_result("37 ± 1 × 2 – 中")
    assert output.buffer.getvalue().decode(encoding) == f"{expected}\n"


@needs_shell
def test_help_is_printed_in_any_encoding():
    done = run_in_shell("", "-m", "smelt", "--help", PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stderr) == (0, b"")
