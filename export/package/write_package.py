"""Write a package, the parts common to all formats: support check, atomic folder, manifest, README.md.

A folder is created atomically: complete or not at all. If a format does not support an artifact, the error
suggests artifacts and formats that fit. README.md has origin, scores, size and usage.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from smelt.core.artifact import CHECKSUMS_FILE, Artifact, FileRecord, is_ignorable_file, write_manifest
from smelt.core.errors import InputError, RunError
from smelt.core.files import (
    folder_size,
    fsync_path,
    read_json_object,
    seconds_since_written,
    sha256_of,
)
from smelt.core.locks import STALE_AFTER_S, heartbeat, is_active
from smelt.core.messages import Message, escape_controls, warning, with_article
from smelt.export.batch_dependence import DEPENDS_ON_BATCH
from smelt.export.package.package_format import PackageFormat, PackageOrigin, UsageNotes
from smelt.export.settings import FIXED_SIZES

_WIDTH = 110
_MAX_LENGTH = 60  # characters of a setting's value
# Characters with a meaning in Markdown and HTML.
_MARKDOWN_CHARACTERS = re.compile(
    r"[\\`*<>|~#&]|\](?=[(\[:])|_(?![0-9A-Za-z])|(?<![0-9A-Za-z])_|^[-+=](?=\W|$)|(?<=^\d)[.)](?=\s)"
)


def escape_markdown(text: str) -> str:
    """Return `text`, which may be untrusted, escaped for Markdown: one line without markup."""
    line = " ".join(escape_controls(text).split())
    return _MARKDOWN_CHARACTERS.sub(
        lambda mark: f"&#{ord(mark[0])};" if mark[0] in "<>&|" else f"\\{mark[0]}", line
    )


def markdown_code(text: str) -> str:
    """Return `text` as inline code of Markdown, outside of tables."""
    line = " ".join(escape_controls(text).split()) or " "
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}" if "`" in line else f"{fence}{line}{fence}"


def make_readme(
    package_format: PackageFormat,
    artifact: Artifact,
    origin: PackageOrigin,
    usage: UsageNotes,
    folder: Path,
    name: str,
) -> str:
    """Return the text of README.md for the package in `folder`, whose final name is `name`."""
    parts = [
        f"# {escape_markdown(name)}",
        _introduction(package_format, artifact, origin),
        _steps(origin),
        _scores(origin),
    ]
    parts += [_sizes(artifact, folder), _usage_section(usage), "\n".join(f"- {note}" for note in usage.notes)]
    license = escape_markdown(origin.license or "not stated")
    parts += [
        f"## License\n\nLicense of the model that this was made from: {license}.",
        f"## Files\n\n`{CHECKSUMS_FILE}` lists the SHA-256 of every file; check them with `sha256sum -c"
        f" {CHECKSUMS_FILE}`.",
    ]
    front = f"---\n{usage.front_matter.strip()}\n---\n\n" if usage.front_matter else ""
    return front + "\n\n".join(part for part in parts if part) + "\n"


def _introduction(form: PackageFormat, artifact: Artifact, origin: PackageOrigin) -> str:
    details = artifact.manifest.details
    introduction = (
        f"A model for {escape_markdown(artifact.manifest.task)}, packaged by smelt as `{form.name}`:"
        f" {form.summary}."
    )
    lines = ["| | |", "|---|---|", f"| made from | {escape_markdown(origin.model or 'unknown')} |"]
    lines += [f"| run | {escape_markdown(origin.run)} |"] if origin.run else []
    target = f", exported for {escape_markdown(str(details['target']))}" if details.get("target") else ""
    lines += [f"| format | {artifact.format}{target} |"]
    lines += [f"| parameters | {details['parameters']:,} |"] if details.get("parameters") else []
    lines += [f"| artifact | {markdown_code(artifact.key)} |"]
    return f"{introduction}\n\n" + "\n".join(lines)


def _steps(origin: PackageOrigin) -> str:
    if not origin.steps:
        return ""
    lines = ["## Steps", "", "| step | stage | settings |", "|---|---|---|"]
    lines += [
        f"| {escape_markdown(s.name)} | {escape_markdown(s.stage)} | {_settings(s.settings)} |"
        for s in origin.steps
    ]
    return "\n".join(lines)


def _settings(values: Mapping[str, Any]) -> str:
    value_texts = (textwrap.shorten(json.dumps(v, ensure_ascii=False), _MAX_LENGTH) for v in values.values())
    return (
        ", ".join(
            f"{escape_markdown(k)}: {escape_markdown(v)}" for k, v in zip(values, value_texts, strict=True)
        )
        or "–"
    )


def _scores(origin: PackageOrigin) -> str:
    if not origin.scores:
        run_text = "of this run" if origin.run else "of an artifact without its run"
        return f"## Scores\n\nThe scores {run_text} are unknown. Run `smelt eval` to score it on your data."
    lines = [
        "## Scores",
        "",
        "| metric | value [95 % interval] | n | baseline |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {escape_markdown(s.metric)} | {escape_markdown(s.text)} | {s.n:,}"
        f" | {escape_markdown(s.baseline or '–')} |"
        for s in origin.scores
    ]
    if origin.split != "test":
        lines += [
            "",
            "Scored on the samples among which this step was chosen; the score on new samples may be lower.",
        ]
    lines += (
        ["", *(f"- **{escape_markdown(score_warning.message)}**" for score_warning in origin.warnings)]
        if origin.warnings
        else []
    )
    lines += ["", *(f"- {escape_markdown(s.metric)}: {markdown_code(s.signature)}" for s in origin.scores)]
    lines += ["", *(f"- {escape_markdown(line)}" for line in origin.latencies)] if origin.latencies else []
    return "\n".join(lines)


def _sizes(artifact: Artifact, folder: Path) -> str:
    artifact_bytes, folder_bytes = artifact.size_bytes, folder_size(folder)
    return (
        f"## Size\n\nGraphs and weights of the artifact: {artifact_bytes:,} bytes. This folder: "
        f"{folder_bytes:,} bytes,"
        " without README.md and the checksums."
    )


def _usage_section(how: UsageNotes) -> str:
    parts = ["## How to use it", f"In this folder:\n\n```bash\n{how.install}\n{how.run}\n```"]
    parts += [f"```{language}\n{code.strip()}\n```" for language, code in how.examples]
    return "\n\n".join(parts)


FILE_MODE, FOLDER_MODE = 0o644, 0o755
_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
# ... as libraries of Rust and C++ report it, in errors of their own
_DISK_FULL_MESSAGES = ("no space left on device", "disk quota exceeded", "os error 28)", "os error 122)")
_PART_SUFFIX, _OWNER_SUFFIX = ".part", ".owner"
_MAX_NAME_LENGTH = 80  # characters of the package's name in the name of the temporary folder


def require_empty_destination(out: Path) -> None:
    """Require that a folder can be created at `out`: nothing is there, or an empty folder.

    Raises:
        InputError: the path exists, or a parent is a file.
    """
    with translate_os_errors(out):
        if out.is_symlink() or (out.exists() and not out.is_dir()):
            raise InputError(
                f"{out}: this path exists and is not a folder. Set another --out.",
                code="not-a-folder",
                file=str(out),
            )
        if out.is_dir() and any(out.iterdir()):
            raise InputError(
                f"{out}: this folder is not empty. Set another --out, or remove it first.",
                code="folder-not-empty",
                file=str(out),
            )
        if out.exists() and out.samefile(Path.cwd()):
            raise InputError(
                f"{out}: this is the current folder; a package needs a new one. Set --out to a new folder.",
                code="current-folder",
                file=str(out),
            )
        existing_parent = next(path for path in out.absolute().parents if path.exists() or path.is_symlink())
        if not existing_parent.is_dir():
            raise InputError(
                f"{existing_parent}: this is a file, but {out} needs a folder there. Set another "
                "--out, or move the"
                " file.",
                code="parent-not-a-folder",
                file=str(existing_parent),
            )


@contextlib.contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder next to `out` that becomes `out` on exit; on an error nothing remains.

    All files and folders get the modes 0644 and 0755, whatever the umask, because a container's user may read
    them too. Folders of killed processes that were creating `out` are removed; a marker next to each folder
    distinguishes them from those of running processes, as in the store (`smelt.core.locks`).

    Raises:
        InputError: `out` exists and is not empty, or cannot be written.
        RunError: the disk is full.
    """
    out = out.absolute()
    require_empty_destination(out)
    missing = [parent for parent in out.parents if not parent.exists()]
    temporary = out.with_name(f".{out.name[:_MAX_NAME_LENGTH]}.{secrets.token_hex(4)}{_PART_SUFFIX}")
    try:
        with translate_os_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(out)
            with heartbeat(temporary.with_name(temporary.name + _OWNER_SUFFIX)):
                temporary.mkdir()
                yield temporary
                _finalize_files(temporary)
                with contextlib.suppress(FileNotFoundError):
                    out.rmdir()  # an empty folder, which Windows does not replace by a rename
                temporary.rename(out)
                fsync_path(out.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in missing:  # the deepest first; one that has been filled meanwhile is kept
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def _remove_stale(out: Path) -> None:
    """Remove unfinished packages of dead processes for `out`."""
    name = re.compile(rf"\.{re.escape(out.name[:_MAX_NAME_LENGTH])}\.[0-9a-f]{{8}}{re.escape(_PART_SUFFIX)}")
    for stale_path in [
        path for path in out.parent.iterdir() if name.fullmatch(path.name.removesuffix(_OWNER_SUFFIX))
    ]:
        part = stale_path.with_name(stale_path.name.removesuffix(_OWNER_SUFFIX))
        marker = part.with_name(part.name + _OWNER_SUFFIX)
        at_work = is_active(marker) if marker.exists() else seconds_since_written(part) < STALE_AFTER_S
        if not at_work:
            shutil.rmtree(part, ignore_errors=True)
            marker.unlink(missing_ok=True)


@contextlib.contextmanager
def translate_os_errors(out: Path) -> Iterator[None]:
    """Convert errors of the file system below `out` to smelt's.

    Raises:
        InputError: a file cannot be read, written or created.
        RunError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL_ERRORS:
            raise _disk_full_error(out) from error
        failed_path = Path(os.fsdecode(error.filename) if error.filename else out)
        # the temporary folder has a name that the user does not know
        failed_path = out.parent if failed_path.name.endswith((_PART_SUFFIX, _OWNER_SUFFIX)) else failed_path
        reason = error.strerror or str(error)
        raise InputError(
            f"{failed_path}: {reason}. Nothing was written to {out}. Set another --out.",
            code="unwritable-path",
            file=str(failed_path),
        ) from error
    except Exception as error:
        if not any(disk_full_message in str(error).lower() for disk_full_message in _DISK_FULL_MESSAGES):
            raise
        raise _disk_full_error(out) from error


def _disk_full_error(out: Path) -> RunError:
    return RunError(
        f"{out}: the disk is full{_free_space(out)}. The package was not written. Free disk space, or set"
        " another --out.",
        code="disk-full",
        file=str(out),
    )


def _free_space(out: Path) -> str:
    parent_folder = next((parent for parent in out.parents if parent.exists()), None)
    with contextlib.suppress(OSError):
        return "" if parent_folder is None else f" ({shutil.disk_usage(parent_folder).free:,} bytes are free)"
    return ""


def _finalize_files(folder: Path) -> None:
    """Set the modes of all files and flush them to the disk.

    Raises:
        RunError: the package contains a link.
    """
    for path in (folder, *sorted(folder.rglob("*"))):
        if path.is_symlink():
            raise RunError(
                f"{path.name}: this file is a link; a package must contain regular files only.",
                code="link-in-package",
                file=path.name,
            )
        if os.name != "nt":
            path.chmod(FOLDER_MODE if path.is_dir() else FILE_MODE)
        fsync_path(path)


README_FILE = "README.md"


@dataclass(frozen=True)
class WrittenPackage:
    """A written package.

    folder: its path. usage: how it is used. size_bytes: of all its files. warnings: reasons against using it.
    """

    folder: Path
    usage: UsageNotes
    size_bytes: int
    warnings: tuple[Message, ...] = ()


def write_package(
    package_format: PackageFormat, artifact: Artifact, origin: PackageOrigin, out: Path
) -> WrittenPackage:
    """Write `artifact`, which `package_format` supports, into the new folder `out`, completely or not at all.

    Raises:
        InputError: `out` exists and is not empty, or cannot be written; or the artifact does not fit.
        RunError: the disk is full, or the result is not correct.
    """
    warnings = tuple(_batch_warnings(artifact))
    with atomic_folder(out) as folder:
        usage_notes = package_format.write(artifact, origin, folder)
        usage_notes = replace(usage_notes, notes=(*usage_notes.notes, *(one.message for one in warnings)))
        text = make_readme(package_format, artifact, origin, usage_notes, folder, out.absolute().name)
        (folder / README_FILE).write_text(text, encoding="utf-8")
        if package_format.is_artifact:
            _write_manifest(artifact, folder)
        _write_checksums(folder)
        size = folder_size(folder)
    return WrittenPackage(out, usage_notes, size, (*origin.warnings, *warnings))


def _batch_warnings(artifact: Artifact) -> Iterator[Message]:
    """Yield a warning if the artifact's answers depend on the other samples of their batch."""
    if artifact.manifest.details.get(DEPENDS_ON_BATCH):
        yield warning(
            "answers-depend-on-batch",
            "Answers depend on the other samples of their batch, because int8 ranges are computed over all of"
            " them. Where a batch holds inputs of several users, quantize with int8-static or"
            " int8-groupwise, or pass one sample per call.",
        )


def copy_artifact(artifact: Artifact, folder: Path, skip: Collection[str] = ()) -> None:
    """Copy the model's files in `artifact`, without the manifest and `skip`, into `folder`."""
    for name in artifact.model_files:
        if name in skip:
            continue
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(artifact.path / name, target)


def _package_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _write_manifest(artifact: Artifact, folder: Path) -> None:
    """Write a manifest, so that the package is an artifact; it lists the files that are loaded.

    Files that a user may edit (README.md, infer.py) are not listed, so that changes to them are allowed.
    """
    relative_paths = {path.relative_to(folder): path for path in _package_files(folder)}
    files = {
        name.as_posix(): FileRecord(sha256=sha256_of(path), size_bytes=path.stat().st_size)
        for name, path in relative_paths.items()
        if not is_ignorable_file(name)
    }
    write_manifest(folder, artifact.manifest.model_copy(update={"files": files}))


def _write_checksums(folder: Path) -> None:
    """Write the SHA-256 of every file as `sha256sum` does."""
    lines = [f"{sha256_of(path)}  {path.relative_to(folder).as_posix()}\n" for path in _package_files(folder)]
    (folder / CHECKSUMS_FILE).write_bytes("".join(lines).encode())


class UnsupportedFormat(NamedTuple):
    """The reason why a format does not support an artifact.

    code, text: of the error. needs_export: whether another export of the model may be supported.
    """

    code: str
    text: str
    needs_export: bool = False


def unsupported_format(package_format: PackageFormat, artifact: Artifact) -> UnsupportedFormat | None:
    """Return why `package_format` does not support `artifact`; None if it does.

    Properties that no export changes are checked first, so that no useless step is suggested.
    """
    supported_inputs, manifest = package_format.supported, artifact.manifest
    artifact_format, target = artifact.format, manifest.details.get("target")
    if supported_inputs.tasks is not None and manifest.task not in supported_inputs.tasks:
        return UnsupportedFormat(
            "unsupported-task",
            f"its task is {manifest.task}; this format supports {_join_words(supported_inputs.tasks)}.",
        )
    family = read_json_object(artifact.path / "config.json").get("model_type")
    if supported_inputs.families is not None and family not in supported_inputs.families:
        text = f"its model family is {family}; this format supports {_join_words(supported_inputs.families)}."
        return UnsupportedFormat("unsupported-family", text)
    if artifact_format not in supported_inputs.formats:
        supported = _join_words(supported_inputs.formats)
        text = f"it is {with_article(artifact_format)} artifact; this format supports {supported}."
        return UnsupportedFormat("unsupported-format", text, needs_export=True)
    if supported_inputs.targets is not None and target not in supported_inputs.targets:
        text = f"it was exported for {target}; this format supports {_join_words(supported_inputs.targets)}."
        return UnsupportedFormat("unsupported-target", text, needs_export=True)
    try:
        _require_dynamic_shapes(package_format, artifact)
        package_format.check(artifact)
    except InputError as error:
        return UnsupportedFormat(error.code, str(error))
    return None


def _require_dynamic_shapes(package_format: PackageFormat, artifact: Artifact) -> None:
    """Require a graph of any batch size and length, unless the format pads.

    Raises:
        InputError: `fixed-shapes`.
    """
    details = artifact.manifest.details
    sizes = ", ".join(f"{name}: {details[name]}" for name in FIXED_SIZES if name in details)
    if sizes and not package_format.supported.fixed_shapes:
        raise InputError(
            f"its graph has fixed shapes ({sizes}), and this format's program passes batches of any size."
            " Export it without these settings.",
            code="fixed-shapes",
        )


def require_supported(
    package_format: PackageFormat,
    artifact: Artifact,
    name: str,
    forms: Iterable[PackageFormat],
    run: Mapping[str, Artifact],
) -> None:
    """Require that `package_format` supports `artifact`, which the user named `name`.

    Args:
        package_format: the requested format.
        artifact: the artifact to package.
        name: the path that the user gave.
        forms: all formats.
        run: the other artifacts of the same run, by their steps.

    Raises:
        InputError: it does not; names artifacts of this run that fit, and the formats that support the
            artifact.
    """
    unsupported = unsupported_format(package_format, artifact)
    if unsupported is None:
        return
    sentences = [f"{name} cannot be packaged as '{package_format.name}': {unsupported.text.strip()}"]
    if supported_steps := [
        step for step, other in run.items() if unsupported_format(package_format, other) is None
    ]:
        steps = f"step{'s' * (len(supported_steps) > 1)} {_join_words(supported_steps)}"
        sentences.append(
            f"This format supports the {steps} of the same run (artifacts/{supported_steps[0]})."
        )
    elif unsupported.needs_export and package_format.supported.hint:
        sentences.append(package_format.supported.hint)
    if alternatives := [other.name for other in forms if unsupported_format(other, artifact) is None]:
        sentences.append(f"Formats that support this artifact: {', '.join(alternatives)} (--format).")
    raise InputError(" ".join(sentences), code=unsupported.code)


def _join_words(words: Iterable[str]) -> str:
    """Return "a", "a and b", or "a, b and c"; a set in alphabetical order."""
    items = sorted(words) if isinstance(words, frozenset) else list(words)
    return " and ".join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else "".join(items)
