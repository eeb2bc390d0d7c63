"""README.md of a package: what it is, how good, how large, how it is loaded."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.artifact import SUMS, Artifact
from smelt.core.files import size_of
from smelt.core.text import printable
from smelt.export.package.form import Form, HowTo, Origin

_WIDTH = 110
_LONGEST = 60  # characters of a setting's value
# What Markdown and HTML read otherwise than it stands there.
_MARKS = re.compile(
    r"[\\`*<>|~#&]|\](?=[(\[:])|_(?![0-9A-Za-z])|(?<![0-9A-Za-z])_|^[-+=](?=\W|$)|(?<=^\d)[.)](?=\s)"
)


def plain(text: str) -> str:
    """Return `text`, which a stranger may have chosen, as Markdown shows it: one line without markup."""
    line = " ".join(printable(text).split())
    return _MARKS.sub(lambda mark: f"&#{ord(mark[0])};" if mark[0] in "<>&|" else f"\\{mark[0]}", line)


def code(text: str) -> str:
    """Return `text` as Markdown's code, outside of tables."""
    line = " ".join(printable(text).split()) or " "
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}" if "`" in line else f"{fence}{line}{fence}"


def readme(form: Form, artifact: Artifact, origin: Origin, how: HowTo, folder: Path, name: str) -> str:
    """Return the text of README.md for the package in `folder`, which will be called `name`."""
    parts = [f"# {plain(name)}", _what(form, artifact, origin), _steps(origin), _scores(origin)]
    parts += [_sizes(artifact, folder), _loading(how), _notes(how)]
    licence = plain(origin.licence or "not stated")
    parts += [
        f"## Licence\n\nLicence of the model that this was made from: {licence}.",
        f"## Files\n\n`{SUMS}` has the SHA-256 of every file: `sha256sum -c {SUMS}` compares them.",
    ]
    front = f"---\n{how.front.strip()}\n---\n\n" if how.front else ""
    return front + "\n\n".join(part for part in parts if part) + "\n"


def _what(form: Form, artifact: Artifact, origin: Origin) -> str:
    details = artifact.manifest.details
    words = (
        f"A model for {plain(artifact.manifest.task)}, packaged by smelt as `{form.name}`: {form.summary}."
    )
    lines = ["| | |", "|---|---|", f"| made from | {plain(origin.model or 'not known here')} |"]
    lines += [f"| run | {plain(origin.run)} |"] if origin.run else []
    target = f", exported for {plain(str(details['target']))}" if details.get("target") else ""
    lines += [f"| format | {artifact.format}{target} |"]
    lines += [f"| parameters | {details['parameters']:,} |"] if details.get("parameters") else []
    lines += [f"| artifact | {code(artifact.key)} |"]
    return f"{words}\n\n" + "\n".join(lines)


def _steps(origin: Origin) -> str:
    if not origin.steps:
        return ""
    lines = ["## What was done to it", "", "| step | stage | settings |", "|---|---|---|"]
    lines += [f"| {plain(s.name)} | {plain(s.stage)} | {_settings(s.settings)} |" for s in origin.steps]
    return "\n".join(lines)


def _settings(values: Mapping[str, Any]) -> str:
    shown = (textwrap.shorten(json.dumps(v, ensure_ascii=False), _LONGEST) for v in values.values())
    return ", ".join(f"{plain(k)}: {plain(v)}" for k, v in zip(values, shown, strict=True)) or "–"


def _scores(origin: Origin) -> str:
    if not origin.scores:
        where = "of its run" if origin.run else "of an artifact without its run"
        return f"## Scores\n\nThe scores {where} are not known. `smelt eval` scores it on data of your own."
    lines = [
        "## Scores",
        "",
        "| metric | value [95 % interval] | n | the baseline |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {plain(s.metric)} | {plain(s.text)} | {s.n:,} | {plain(s.baseline or '–')} |"
        for s in origin.scores
    ]
    if origin.split != "test":
        lines += ["", "Scored on the rows among which this step was chosen: new ones may score lower."]
    lines += ["", *(f"- **{plain(doubt.message)}**" for doubt in origin.doubts)] if origin.doubts else []
    lines += ["", *(f"- {plain(s.metric)}: {code(s.signature)}" for s in origin.scores)]
    lines += ["", *(f"- {plain(line)}" for line in origin.times)] if origin.times else []
    return "\n".join(lines)


def _sizes(artifact: Artifact, folder: Path) -> str:
    deployed, whole = artifact.size_bytes, size_of(folder)
    return (
        f"## Size\n\nGraphs and weights of the artifact {deployed:,} bytes, this folder {whole:,} bytes"
        " without README.md and what lists its files."
    )


def _loading(how: HowTo) -> str:
    parts = ["## How to use it", f"In this folder:\n\n```bash\n{how.install}\n{how.run}\n```"]
    parts += [f"```{language}\n{code.strip()}\n```" for language, code in how.load]
    return "\n\n".join(parts)


def _notes(how: HowTo) -> str:
    return "\n".join(f"- {note}" for note in how.notes)
