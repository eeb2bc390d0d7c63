"""What `smelt store` does: list what is kept, remove what no run uses, compare every file with its hash."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from smelt.core.artifact import MANIFEST, read_manifest, strangers
from smelt.core.errors import InputError
from smelt.core.files import load_json, sha256_of, size_of
from smelt.core.store.kept import KeptFiles, all_kept, remove_kept
from smelt.core.store.store import Store
from smelt.core.store.unfinished import all_unfinished
from smelt.execute.store_runs import Run, cleaning, runs_of

_WIDTH = 80
_CHANGED = "its bytes are not those that were written"
_KEY = 12  # digits of a key that a person is shown


@dataclass(frozen=True)
class Entry:
    """An artifact in the store.

    key: its address. stage: what made it (`?`: its manifest cannot be read). parent: the key of what it
    was made from. made: seconds since 1970. size_bytes: of all its files. used_by: RUN/STEP of each run.
    """

    key: str
    stage: str
    parent: str | None
    made: float
    size_bytes: int
    used_by: tuple[str, ...]


@dataclass(frozen=True)
class Unused:
    """What no run uses: artifacts, and files of scores (and of times) of artifacts that are not there.

    kept: files that were made of such artifacts. unfinished: checkpoints of steps that were stopped.
    size_bytes: of all of it.
    """

    artifacts: tuple[Entry, ...]
    files: tuple[Path, ...]
    size_bytes: int
    kept: tuple[KeptFiles, ...] = ()
    unfinished: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Damage:
    """A file of the store that is not what was written."""

    path: Path
    problem: str


def open_store(folder: Path) -> Path:
    """Return the root of the store that `folder` means: itself, or `.store` in it.

    Raises:
        InputError: there is no store.
    """
    for root in (folder, folder / ".store"):
        if (root / "artifacts").is_dir() and (root / "scores").is_dir():
            return root.resolve()
    raise InputError(
        f"{folder}: no store there. Give the folder of one with --store, such as runs/.store or runs.",
        code="missing-store",
        file=str(folder),
    )


def entries(root: Path) -> list[Entry]:
    """Return the artifacts of the store, oldest first."""
    users = _users(runs_of(root))
    found = []
    for path in (root / "artifacts").iterdir():
        if not path.is_dir():
            continue
        try:
            manifest = read_manifest(path)
            stage, parent = manifest.stage, manifest.parent
        except InputError:
            stage, parent = "?", None
        made = (path / MANIFEST if (path / MANIFEST).is_file() else path).stat().st_mtime
        used = tuple(users.get(path.name, ()))
        found.append(Entry(path.name, stage, parent, made, size_of(path), used))
    return sorted(found, key=lambda entry: (entry.made, entry.key))


def unused(root: Path) -> Unused:
    """Return what the store keeps and no known run uses."""
    kept = entries(root)
    artifacts = tuple(entry for entry in kept if not entry.used_by)
    staying = {entry.key for entry in kept if entry.used_by}
    files = [path for path in (root / "scores").glob("*.json") if _is_orphan(path, staying)]
    files += [path for path in (root / "checked").glob("*.json") if path.stem not in staying]
    kept_files = tuple(found for found in all_kept(root) if not _serves(found, staying))
    size = sum(entry.size_bytes for entry in artifacts) + sum(found.size_bytes for found in kept_files)
    size += sum(path.stat().st_size for path in files)
    stopped = all_unfinished(root)
    return Unused(artifacts, tuple(sorted(files)), size + sum(stopped.values()), kept_files, tuple(stopped))


def remove_unused(root: Path) -> Unused:
    """Remove what no run uses; return what that was.

    Raises:
        InputError: a run works on this store now; it may be about to use what looks unused.
    """
    store = Store(root)
    with cleaning(root):
        busy = [str(run.folder) for run in runs_of(root) if run.busy]
        if busy:
            raise InputError(
                f"{root}: a run is at work in {', '.join(busy)}. Clean when it has ended.",
                code="store-in-use",
                file=str(root),
            )
        found = unused(root)
        for entry in found.artifacts:
            store.remove(entry.key)
        for path in found.files:
            path.unlink(missing_ok=True)
        for kept in found.kept:
            remove_kept(kept.path)
        for folder in found.unfinished:
            remove_kept(folder)
    return found


def damages(root: Path) -> list[Damage]:
    """Compare every file of every artifact with its recorded size and hash, and read every score."""
    found = []
    for path in sorted((root / "artifacts").iterdir()):
        if not path.is_dir():
            found.append(Damage(path, "no artifact, and no folder"))
            continue
        try:
            manifest = read_manifest(path)
        except InputError as error:
            found.append(Damage(path, str(error).removeprefix(f"{path}: ")))
            continue
        if manifest.key != path.name:
            found.append(Damage(path / MANIFEST, "the manifest of another artifact"))
        noted = _read(root / "checked" / f"{path.name}.json") or {}
        if noted.get("manifest", digest := sha256_of(path / MANIFEST)) != digest:
            found.append(Damage(path / MANIFEST, _CHANGED))
        found += [Damage(stranger, problem) for stranger, _, problem in strangers(path, manifest)]
        for name, record in manifest.files.items():
            if problem := _problem(path / name, record.size_bytes, record.sha256):
                found.append(Damage(path / name, problem))
    for path in sorted((root / "scores").glob("*.json")):
        if _read(path) is None:
            found.append(Damage(path, "no JSON object; it is measured again when it is needed"))
    for kept in all_kept(root):
        if wrong := kept.damage():
            found.append(Damage(wrong[0], f"{wrong[1]}; it is made again when it is needed"))
    return found


def list_text(root: Path) -> str:
    """Return `smelt store list` as text of at most 80 columns."""
    kept = entries(root)
    scores = list((root / "scores").glob("*.json"))
    size = sum(entry.size_bytes for entry in kept)
    head = f"{root}: {_count(len(kept), 'artifact')}, {_megabytes(size)} MB;"
    head += f" {_count(len(scores), 'score')}, {_megabytes(sum(p.stat().st_size for p in scores))} MB"
    lines = [*_wrapped(head, 2), "", *_table(kept)]
    others = all_kept(root)
    if others:
        lines += ["", "kept besides, and made again where it is gone:"]
        lines += [f"  {_megabytes(found.size_bytes):>8} MB  {found.words}" for found in others]
    stopped = all_unfinished(root)
    if stopped:
        lines += ["", "checkpoints of steps that were stopped, from which they go on:"]
        lines += [f"  {_megabytes(size):>8} MB  {folder.name[:_KEY]}" for folder, size in stopped.items()]
    spare = [entry for entry in kept if not entry.used_by]
    if spare:
        size = sum(entry.size_bytes for entry in spare)
        lines += [
            "",
            *_wrapped(f"No run uses {len(spare)} of them, {_megabytes(size)} MB: `store clean`.", 0),
        ]
    return "\n".join(lines)


def clean_text(found: Unused, removed: bool) -> str:
    """Return what `smelt store clean` says; `removed`: it was done, not only looked for."""
    if not (found.artifacts or found.files or found.kept or found.unfinished):
        return "Nothing to remove: a run uses all that is kept."
    what = f"{_count(len(found.artifacts), 'artifact')} and {_count(len(found.files), 'file')} of scores"
    if found.kept:
        what += f" and {_count(len(found.kept), 'folder')} of logits or statistics"
    if found.unfinished:
        what += f" and checkpoints of {_count(len(found.unfinished), 'step')} that were stopped"
    total = f"{what}, {_megabytes(found.size_bytes)} MB"
    last = f"Removed {total}." if removed else f"No run uses {total}. Remove with --yes."
    return "\n".join([*_table(found.artifacts), "", *_wrapped(last, 0)])


def check_text(root: Path, found: list[Damage]) -> str:
    """Return what `smelt store check` says."""
    count = _count(sum(path.is_dir() for path in (root / "artifacts").iterdir()), "artifact")
    if not found:
        return f"{count}: every file is as it was written."
    lines = [f"{damage.path}: {damage.problem}" for damage in found]
    advice = "Run the recipe again with --rebuild STEP to build an artifact again."
    return "\n".join([*lines, f"{count}, {_count(len(found), 'damaged file')}. {advice}"])


def list_json(root: Path) -> str:
    """Return `smelt store list --json`."""
    artifacts = [asdict(entry) for entry in entries(root)]
    kept = [
        {"key": found.path.name, "what": found.words, "size_bytes": found.size_bytes}
        for found in all_kept(root)
    ]
    stopped = {path.name: size for path, size in all_unfinished(root).items()}
    return json.dumps(
        {"store": str(root), "artifacts": artifacts, "kept": kept, "unfinished": stopped}, indent=1
    )


def _users(runs: list[Run]) -> dict[str, list[str]]:
    users: dict[str, list[str]] = {}
    for run in runs:
        for step, key in run.steps.items():
            users.setdefault(key, []).append(f"{run.folder.name}/{step}")
    return users


def _serves(found: KeptFiles, staying: set[str]) -> bool:
    """Say whether all that kept files were made of will be there; damaged ones serve nothing."""
    return found.note is not None and staying.issuperset(found.note.artifacts)


def _is_orphan(path: Path, staying: set[str]) -> bool:
    """Say whether a score is of an artifact that will not be there; one that names none stays."""
    of = (_read(path) or {}).get("artifact")
    return isinstance(of, str) and of not in staying


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        value = load_json(path)
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _problem(path: Path, size_bytes: int, sha256: str) -> str:
    """Return what is wrong with a file, or an empty text."""
    if not path.is_file():
        return "missing"
    size = path.stat().st_size
    if size != size_bytes:
        return f"{size:,} bytes, {size_bytes:,} were written"
    return "" if sha256_of(path) == sha256 else _CHANGED


def _table(kept: tuple[Entry, ...] | list[Entry]) -> list[str]:
    if not kept:
        return []
    stage = max(5, *(len(entry.stage) for entry in kept))
    sizes = [_megabytes(entry.size_bytes) for entry in kept]
    width = max(2, *map(len, sizes))
    lines = [f"{'key':{_KEY}}  {'stage':{stage}}  {'made':16}  {'MB':>{width}}  used by"]
    for entry, size in zip(kept, sizes, strict=True):
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.made))
        line = f"{entry.key[:_KEY]:{_KEY}}  {entry.stage:{stage}}  {made}  {size:>{width}}  "
        used = ", ".join(entry.used_by) or "-"
        room = _WIDTH - len(line)
        lines.append(line + (used if len(used) <= room else used[: room - 3] + "..."))
    return lines


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f}"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)
