"""Write README.md of a package: origin, scores, size and usage."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.artifact import CHECKSUMS_FILE, Artifact
from smelt.core.files import folder_size
from smelt.core.text import escape_controls
from smelt.export.package.package_format import PackageFormat, PackageOrigin, UsageNotes

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
    parts += [_sizes(artifact, folder), _usage_section(usage), _notes(usage)]
    licence = escape_markdown(origin.licence or "not stated")
    parts += [
        f"## Licence\n\nLicence of the model that this was made from: {licence}.",
        f"## Files\n\n`{CHECKSUMS_FILE}` lists the SHA-256 of every file; check them with `sha256sum -c"
        f" {CHECKSUMS_FILE}`.",
    ]
    front = f"---\n{usage.front_matter.strip()}\n---\n\n" if usage.front_matter else ""
    return front + "\n\n".join(part for part in parts if part) + "\n"


def _introduction(form: PackageFormat, artifact: Artifact, origin: PackageOrigin) -> str:
    details = artifact.manifest.details
    words = (
        f"A model for {escape_markdown(artifact.manifest.task)}, packaged by smelt as `{form.name}`:"
        f" {form.summary}."
    )
    lines = ["| | |", "|---|---|", f"| made from | {escape_markdown(origin.model or 'unknown')} |"]
    lines += [f"| run | {escape_markdown(origin.run)} |"] if origin.run else []
    target = f", exported for {escape_markdown(str(details['target']))}" if details.get("target") else ""
    lines += [f"| format | {artifact.format}{target} |"]
    lines += [f"| parameters | {details['parameters']:,} |"] if details.get("parameters") else []
    lines += [f"| artifact | {markdown_code(artifact.key)} |"]
    return f"{words}\n\n" + "\n".join(lines)


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
    shown = (textwrap.shorten(json.dumps(v, ensure_ascii=False), _MAX_LENGTH) for v in values.values())
    return (
        ", ".join(f"{escape_markdown(k)}: {escape_markdown(v)}" for k, v in zip(values, shown, strict=True))
        or "–"
    )


def _scores(origin: PackageOrigin) -> str:
    if not origin.scores:
        where = "of this run" if origin.run else "of an artifact without its run"
        return f"## Scores\n\nThe scores {where} are unknown. Run `smelt eval` to score it on your data."
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
        ["", *(f"- **{escape_markdown(doubt.message)}**" for doubt in origin.warnings)]
        if origin.warnings
        else []
    )
    lines += ["", *(f"- {escape_markdown(s.metric)}: {markdown_code(s.signature)}" for s in origin.scores)]
    lines += ["", *(f"- {escape_markdown(line)}" for line in origin.latencies)] if origin.latencies else []
    return "\n".join(lines)


def _sizes(artifact: Artifact, folder: Path) -> str:
    deployed, whole = artifact.size_bytes, folder_size(folder)
    return (
        f"## Size\n\nGraphs and weights of the artifact: {deployed:,} bytes. This folder: {whole:,} bytes,"
        " without README.md and the checksums."
    )


def _usage_section(how: UsageNotes) -> str:
    parts = ["## How to use it", f"In this folder:\n\n```bash\n{how.install}\n{how.run}\n```"]
    parts += [f"```{language}\n{code.strip()}\n```" for language, code in how.examples]
    return "\n\n".join(parts)


def _notes(how: UsageNotes) -> str:
    return "\n".join(f"- {note}" for note in how.notes)
