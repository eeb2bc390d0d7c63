"""Checkpoints of interrupted steps: ``unfinished/KEY/N``, N the index of a training in its step."""

from __future__ import annotations

import shutil
from pathlib import Path

from smelt.core.files import folder_size


class StepCheckpoints:
    """Folders for the checkpoints of a step; they are removed when the step is done."""

    def __init__(self, root: Path, key: str) -> None:
        self.folder = root / "unfinished" / key
        self._trainings = 0

    def next_folder(self) -> Path:
        """Return the folder of the step's next training, which may not exist."""
        self._trainings += 1
        return self.folder / str(self._trainings)

    def remove(self) -> None:
        """Remove all checkpoints."""
        shutil.rmtree(self.folder, ignore_errors=True)


def list_step_checkpoints(root: Path) -> dict[Path, int]:
    """Return the folders of interrupted steps, and their bytes."""
    return {path: folder_size(path) for path in sorted((root / "unfinished").glob("*")) if path.is_dir()}
