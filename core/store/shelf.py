"""What stages make on the way and need again: kept in the store by all that it depends on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.core.files import hash_of
from smelt.core.store.kept import KeptFiles, commit_kept, find_kept, remove_kept
from smelt.core.store.store import Store


@dataclass(frozen=True)
class Shelf:
    """Gives a stage what was made before of the same things.

    versions: of the libraries, on which all results depend. say: a line for the log.
    """

    store: Store
    versions: Mapping[str, str]
    say: Callable[[str], None]

    def value(self, what: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """Return what `make` makes (JSON), from the store where it is there."""
        key = hash_of({"kept": dict(what), "libraries": dict(self.versions)})
        with self.store.lock(key, self._waiting):
            found = self.store.read_score(key)
            if found is None:
                found = {"artifact": what.get("artifact"), "made": make()}
                self.store.write_score(key, found)
        return found["made"]

    @contextmanager
    def files(self, what: Mapping[str, Any], make: Callable[[Path], None]) -> Iterator[tuple[Path, bool]]:
        """Give the folder with what `make` puts into an empty one, and whether it was in the store.

        What is damaged there is made again.
        """
        key = hash_of({"files": dict(what), "libraries": dict(self.versions)})
        words, artifacts = str(what["what"]), list(what["artifacts"])
        with self.store.lock(key, self._waiting):
            found, there = self._find(key, words), True
            if found is None:
                there, started = False, time.monotonic()
                with self.store.workspace() as space:
                    folder = space / "out"
                    folder.mkdir()
                    make(folder)
                    found = commit_kept(self.store, folder, key, words, artifacts)
                took = f"made in {time.monotonic() - started:,.1f} s and kept"
            else:
                took = "kept from before"
            self.say(f"  {words}: {found.size_bytes / 1e6:,.1f} MB, {took}")
        yield found.path, there

    def _find(self, key: str, words: str) -> KeptFiles | None:
        found = find_kept(self.store, key)
        wrong = found.damage() if found is not None else None
        if found is None or wrong is None:
            return found
        self.say(f"  {words}: {wrong[0]}: {wrong[1]}; made again")
        remove_kept(found.path)
        return None

    def _waiting(self, holder: str) -> None:
        self.say(f"waits for {holder}, which is making the same rows")
