"""Intermediate results of stages, cached in the store by all their dependencies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.core.files import json_hash
from smelt.core.store.cached_files import (
    CachedFiles,
    commit_cached_files,
    find_cached_files,
    remove_cached_files,
)
from smelt.core.store.store import Store


@dataclass(frozen=True)
class StageCache:
    """Returns cached results to a stage.

    versions: of the libraries, on which all results depend. log: writes a line to the log.
    """

    store: Store
    versions: Mapping[str, str]
    log: Callable[[str], None]

    def cached_value(self, what: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """Return the result of `make` (JSON), from the store if it is cached."""
        key = json_hash({"kept": dict(what), "libraries": dict(self.versions)})
        with self.store.lock(key, self._report_wait):
            found = self.store.read_score(key)
            if found is None:
                found = {"artifact": what.get("artifact"), "made": make()}
                self.store.write_score(key, found)
        return found["made"]

    @contextmanager
    def cached_files(
        self, what: Mapping[str, Any], make: Callable[[Path], None]
    ) -> Iterator[tuple[Path, bool]]:
        """Yield the folder with the files of `make`, and whether they were cached.

        Damaged files are made again.
        """
        key = json_hash({"files": dict(what), "libraries": dict(self.versions)})
        words, artifacts = str(what["what"]), list(what["artifacts"])
        with self.store.lock(key, self._report_wait):
            found, there = self._find_intact(key, words), True
            if found is None:
                there, started = False, time.monotonic()
                with self.store.workspace() as space:
                    folder = space / "out"
                    folder.mkdir()
                    make(folder)
                    found = commit_cached_files(self.store, folder, key, words, artifacts)
                took = f"made in {time.monotonic() - started:,.1f} s and cached"
            else:
                took = "from the cache"
            self.log(f"  {words}: {found.size_bytes / 1e6:,.1f} MB, {took}")
        yield found.path, there

    def _find_intact(self, key: str, words: str) -> CachedFiles | None:
        found = find_cached_files(self.store, key)
        wrong = found.find_damage() if found is not None else None
        if found is None or wrong is None:
            return found
        self.log(f"  {words}: {wrong[0]}: {wrong[1]}; made again")
        remove_cached_files(found.path)
        return None

    def _report_wait(self, holder: str) -> None:
        self.log(f"waiting for {holder}, which computes the same files")
