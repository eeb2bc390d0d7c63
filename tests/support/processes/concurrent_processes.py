"""Processes that begin at the same moment, and a file system that knows no locks."""

import errno
import fcntl
import subprocess
import sys

# Put before a program: the file system that it works on knows no locks.
WITHOUT_LOCKS = """
import errno, fcntl
def flock(descriptor, how): raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = flock
"""


def start(code, *arguments):
    """Start a Python program; what it prints can be read."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_at_once(code, count, *arguments):
    """Run `count` processes of a program that prints a line when it is ready and then waits for one.

    Returns what each printed after that, with its exit status; none begins before all are ready.
    """
    processes = [start(code, *arguments) for _ in range(count)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [process.communicate(timeout=120)[0] for process in processes]
    return list(zip(results, [process.returncode for process in processes], strict=True))


def disable_file_locks(monkeypatch):
    """Let this process's file systems know no locks, as some network ones do."""

    def flock(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
