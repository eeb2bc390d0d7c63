"""Checkpoints of steps that were stopped: ``unfinished/KEY/N``, N the number of a training in its step."""

from __future__ import annotations

import shutil
from pathlib import Path

from smelt.core.files import size_of


class Unfinished:
    """Where a step leaves what it can go on from; all of it goes when the step is done."""

    def __init__(self, root: Path, key: str) -> None:
        self.folder = root / "unfinished" / key
        self._trainings = 0

    def next_training(self) -> Path:
        """Return the folder of the step's next training, which need not be there."""
        self._trainings += 1
        return self.folder / str(self._trainings)

    def remove(self) -> None:
        """Remove all that was left."""
        shutil.rmtree(self.folder, ignore_errors=True)


def all_unfinished(root: Path) -> dict[Path, int]:
    """Return the folders of steps that were stopped, and their bytes."""
    return {path: size_of(path) for path in sorted((root / "unfinished").glob("*")) if path.is_dir()}
