"""The work of `smelt store`: list stored files, remove unused ones, compare files with their hashes."""

from __future__ import annotations

import json
import textwrap
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from smelt.core.artifact import read_manifest, unexpected_files
from smelt.core.errors import InputError
from smelt.core.files import MANIFEST, folder_size, read_hashed_json, sha256_of
from smelt.core.stage_cache import CachedFiles, list_cached_files, remove_cached_files
from smelt.core.store import Store, list_step_checkpoints
from smelt.pipeline.execute.run_folder import StoreRun, cleaning_lock, damaged_run_records, list_runs

_WIDTH = 80
_HASH_MISMATCH = "changed since it was written (hash mismatch)"
# Files with a hash of their content, and what becomes of a damaged one.
_HASHED_FILES = {
    "scores/*.json": "it is computed again when needed",
    "checked/*.json": "the artifact's files are hashed again when it is used",
    "unfinished/*/*/checkpoint.json": "the training starts from the beginning",
    "runs/*.json": "run the recipe of this run again into its folder",
}
_KEY_DIGITS = 12  # digits of a key in the output


@dataclass(frozen=True)
class StoredArtifact:
    """An artifact in the store.

    key: its content address. stage: the stage that made it (`?` if its manifest cannot be read). parent: key
    of its parent artifact. created: seconds since 1970. size_bytes: of all files. used_by: RUN/STEP of each
    run.
    """

    key: str
    stage: str
    parent: str | None
    created: float
    size_bytes: int
    used_by: tuple[str, ...]


@dataclass(frozen=True)
class UnusedFiles:
    """Files that no run uses: artifacts, and scores and latencies of artifacts that do not exist.

    cached_files: files computed from such artifacts. unfinished: checkpoints of interrupted steps.
    size_bytes: total size.
    """

    artifacts: tuple[StoredArtifact, ...]
    files: tuple[Path, ...]
    size_bytes: int
    cached_files: tuple[CachedFiles, ...] = ()
    unfinished: tuple[Path, ...] = ()


@dataclass(frozen=True)
class DamagedFile:
    """A damaged file of the store."""

    path: Path
    problem: str


def find_store(folder: Path) -> Path:
    """Return the root of the store: `folder`, or `.store` in it.

    Raises:
        InputError: there is no store.
    """
    for root in (folder, folder / ".store"):
        if (root / "artifacts").is_dir() and (root / "scores").is_dir():
            return root.resolve()
    raise InputError(
        f"{folder}: not a store. Set the store's folder with --store, such as runs/.store or runs.",
        code="missing-store",
        file=str(folder),
    )


def stored_artifacts(root: Path) -> list[StoredArtifact]:
    """Return the artifacts of the store, oldest first."""
    users = _runs_by_artifact(list_runs(root))
    artifacts = []
    for path in (root / "artifacts").iterdir():
        if not path.is_dir():
            continue
        try:
            manifest = read_manifest(path)
            stage, parent = manifest.stage, manifest.parent
        except InputError:
            stage, parent = "?", None
        created = (path / MANIFEST if (path / MANIFEST).is_file() else path).stat().st_mtime
        run_names = tuple(users.get(path.name, ()))
        artifacts.append(StoredArtifact(path.name, stage, parent, created, folder_size(path), run_names))
    return sorted(artifacts, key=lambda entry: (entry.created, entry.key))


def find_unused(root: Path) -> UnusedFiles:
    """Return the files in the store that no known run uses."""
    stored = stored_artifacts(root)
    artifacts = tuple(entry for entry in stored if not entry.used_by)
    used_keys = {entry.key for entry in stored if entry.used_by}
    files = [path for path in (root / "scores").glob("*.json") if _is_orphan(path, used_keys)]
    files += [path for path in (root / "checked").glob("*.json") if path.stem not in used_keys]
    kept_files = tuple(
        cached_file
        for cached_file in list_cached_files(root)
        if not (cached_file.note is not None and used_keys.issuperset(cached_file.note.artifacts))
    )
    size = sum(entry.size_bytes for entry in artifacts) + sum(
        cached_file.size_bytes for cached_file in kept_files
    )
    size += sum(path.stat().st_size for path in files)
    checkpoints = list_step_checkpoints(root)
    return UnusedFiles(
        artifacts, tuple(sorted(files)), size + sum(checkpoints.values()), kept_files, tuple(checkpoints)
    )


def remove_unused(root: Path) -> UnusedFiles:
    """Remove and return the files that no run uses.

    Raises:
        InputError: a run is using this store now, and may need files that look unused; or the record of a
            run is damaged (`damaged-run-record`).
    """
    store = Store(root)
    with cleaning_lock(root):
        active_runs = [str(run.folder) for run in list_runs(root) if run.busy]
        if active_runs:
            raise InputError(
                f"{root}: a run is in progress in {', '.join(active_runs)}. Clean the store after the run"
                " has finished.",
                code="store-in-use",
                file=str(root),
            )
        if records := damaged_run_records(root):
            raise InputError(
                f"{records[0]}: {_HASH_MISMATCH}, so the artifacts of this run are unknown. Run its recipe"
                " again into its folder, or remove this file if the run is not needed any more.",
                code="damaged-run-record",
                file=str(records[0]),
            )
        unused = find_unused(root)
        for entry in unused.artifacts:
            store.remove(entry.key)
        for path in unused.files:
            path.unlink(missing_ok=True)
        for cached_file in unused.cached_files:
            remove_cached_files(cached_file.path)
        for folder in unused.unfinished:
            remove_cached_files(folder)
    return unused


def find_damaged_files(root: Path) -> list[DamagedFile]:
    """Return the damaged files: artifacts whose size or hash differs from the record, other JSON files.

    Also returned are artifacts that runs link to and that are missing.
    """
    damaged_files = []
    for path in sorted((root / "artifacts").iterdir()):
        if not path.is_dir():
            damaged_files.append(DamagedFile(path, "not an artifact folder"))
            continue
        try:
            manifest = read_manifest(path)
        except InputError as error:
            damaged_path = path / MANIFEST if (path / MANIFEST).is_file() else path
            damaged_files.append(DamagedFile(damaged_path, str(error).removeprefix(f"{damaged_path}: ")))
            continue
        if manifest.key != path.name:
            damaged_files.append(DamagedFile(path / MANIFEST, "manifest of another artifact"))
        damaged_files += [
            DamagedFile(unexpected_path, problem)
            for unexpected_path, _, problem in unexpected_files(path, manifest)
        ]
        for name, record in manifest.files.items():
            if problem := _file_problem(path / name, record.size_bytes, record.sha256):
                damaged_files.append(DamagedFile(path / name, problem))
    damaged_files += [
        DamagedFile(path, f"{_HASH_MISMATCH}; {remedy}")
        for pattern, remedy in _HASHED_FILES.items()
        for path in sorted(root.glob(pattern))
        if read_hashed_json(path) is None
    ]
    for run in list_runs(root):
        for step, key in run.steps.items():
            if not (root / "artifacts" / key).is_dir():
                problem = f"missing, and used by step '{step}' of {run.folder}"
                damaged_files.append(DamagedFile(root / "artifacts" / key, problem))
    for cached_file in list_cached_files(root):
        if damage := cached_file.find_damage():
            damaged_files.append(DamagedFile(damage[0], f"{damage[1]}; it is computed again when needed"))
    return damaged_files


def store_list_text(root: Path) -> str:
    """Return the output of `smelt store list`, text of at most 80 columns."""
    artifacts = stored_artifacts(root)
    scores = list((root / "scores").glob("*.json"))
    size = sum(entry.size_bytes for entry in artifacts)
    heading = f"{root}: {_pluralize(len(artifacts), 'artifact')}, {_megabytes(size)} MB;"
    heading += f" {_pluralize(len(scores), 'score')}, {_megabytes(sum(p.stat().st_size for p in scores))} MB"
    lines = [*_wrap_lines(heading, 2), "", *_artifact_table(artifacts)]
    cached = list_cached_files(root)
    if cached:
        lines += ["", "cached files, computed again if removed:"]
        lines += [
            f"  {_megabytes(cached_file.size_bytes):>8} MB  {cached_file.description}"
            for cached_file in cached
        ]
    checkpoints = list_step_checkpoints(root)
    if checkpoints:
        lines += ["", "checkpoints of interrupted steps, from which they resume:"]
        lines += [
            f"  {_megabytes(size):>8} MB  {folder.name[:_KEY_DIGITS]}" for folder, size in checkpoints.items()
        ]
    unused = [entry for entry in artifacts if not entry.used_by]
    if unused:
        size = sum(entry.size_bytes for entry in unused)
        lines += [
            "",
            *_wrap_lines(
                f"{_pluralize(len(unused), 'artifact')} not used by any run, {_megabytes(size)} MB. Remove"
                " with `smelt store clean`.",
                0,
            ),
        ]
    return "\n".join(lines)


def store_clean_text(unused: UnusedFiles, removed: bool) -> str:
    """Return the output of `smelt store clean`. removed: whether the files were removed, not only listed."""
    if not (unused.artifacts or unused.files or unused.cached_files or unused.unfinished):
        return "Nothing to remove: all files are used by a run."
    summary = (
        f"{_pluralize(len(unused.artifacts), 'artifact')}, {_pluralize(len(unused.files), 'score file')}"
    )
    if unused.cached_files:
        summary += f", {_pluralize(len(unused.cached_files), 'folder')} of logits or statistics"
    if unused.unfinished:
        summary += f", checkpoints of {_pluralize(len(unused.unfinished), 'interrupted step')}"
    total = f"{summary}; {_megabytes(unused.size_bytes)} MB"
    last = f"Removed {total}." if removed else f"Not used by any run: {total}. Remove with --yes."
    return "\n".join([*_artifact_table(unused.artifacts), "", *_wrap_lines(last, 0)])


def store_check_text(root: Path, damaged: list[DamagedFile]) -> str:
    """Return the output of `smelt store check`."""
    count = _pluralize(sum(path.is_dir() for path in (root / "artifacts").iterdir()), "artifact")
    if not damaged:
        return f"{count}: no damaged files."
    lines = [f"{damage.path}: {damage.problem}" for damage in damaged]
    advice = "Run the recipe again with --rebuild STEP to build an artifact again."
    return "\n".join([*lines, f"{count}, {_pluralize(len(damaged), 'damaged file')}. {advice}"])


def store_list_json(root: Path) -> str:
    """Return the output of `smelt store list --json`."""
    artifacts = [asdict(entry) for entry in stored_artifacts(root)]
    cached_files = [
        {"key": cached_file.path.name, "what": cached_file.description, "size_bytes": cached_file.size_bytes}
        for cached_file in list_cached_files(root)
    ]
    checkpoints = {path.name: size for path, size in list_step_checkpoints(root).items()}
    return json.dumps(
        {"store": str(root), "artifacts": artifacts, "kept": cached_files, "unfinished": checkpoints},
        indent=1,
    )


def _runs_by_artifact(runs: list[StoreRun]) -> dict[str, list[str]]:
    users: dict[str, list[str]] = {}
    for run in runs:
        for step, key in run.steps.items():
            users.setdefault(key, []).append(f"{run.folder.name}/{step}")
    return users


def _is_orphan(path: Path, used_keys: set[str]) -> bool:
    """Return whether a score is damaged or of an unused artifact; one that names no artifact is kept."""
    score = read_hashed_json(path)
    artifact_key = score and score.get("artifact")
    return score is None or (isinstance(artifact_key, str) and artifact_key not in used_keys)


def _file_problem(path: Path, size_bytes: int, sha256: str) -> str:
    """Return what is wrong with a file, or an empty string."""
    if not path.is_file():
        return "missing"
    size = path.stat().st_size
    if size != size_bytes:
        return f"{size:,} bytes instead of {size_bytes:,}"
    return "" if sha256_of(path) == sha256 else _HASH_MISMATCH


def _artifact_table(artifacts: tuple[StoredArtifact, ...] | list[StoredArtifact]) -> list[str]:
    if not artifacts:
        return []
    stage = max(5, *(len(entry.stage) for entry in artifacts))
    sizes = [_megabytes(entry.size_bytes) for entry in artifacts]
    width = max(2, *map(len, sizes))
    lines = [f"{'key':{_KEY_DIGITS}}  {'stage':{stage}}  {'created':16}  {'MB':>{width}}  used by"]
    for entry, size in zip(artifacts, sizes, strict=True):
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.created))
        line = f"{entry.key[:_KEY_DIGITS]:{_KEY_DIGITS}}  {entry.stage:{stage}}  {created}  {size:>{width}}  "
        runs_text = ", ".join(entry.used_by) or "-"
        max_length = _WIDTH - len(line)
        lines.append(
            line + (runs_text if len(runs_text) <= max_length else runs_text[: max_length - 3] + "...")
        )
    return lines


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f}"


def _pluralize(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _wrap_lines(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)
