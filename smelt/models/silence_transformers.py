"""Suppresses the terminal output of transformers."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator

import transformers

_quiet = threading.RLock()


@contextlib.contextmanager
def silence_transformers() -> Iterator[None]:
    """Suppress transformers' progress bars, load reports and advice.

    These settings are process-wide, so only one thread at a time changes and restores them.
    """
    with _quiet:
        yield from _silenced()


def _silenced() -> Iterator[None]:
    caught = warnings.catch_warnings()
    caught.__enter__()
    warnings.simplefilter("ignore")  # MarianTokenizer recommends a package that changes nothing here
    level = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        caught.__exit__(None, None, None)
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()
