"""README.md of a package: what it is, how good, how large, how it is loaded."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.artifact import SUMS, Artifact
from smelt.core.files import size_of
from smelt.export.package.form import Form, HowTo, Origin

_WIDTH = 110
_LONGEST = 60  # characters of a setting's value


def readme(form: Form, artifact: Artifact, origin: Origin, how: HowTo, folder: Path, name: str) -> str:
    """Return the text of README.md for the package in `folder`, which will be called `name`."""
    parts = [f"# {name}", _what(form, artifact, origin), _steps(origin), _scores(origin)]
    parts += [_sizes(artifact, folder), _loading(how), _notes(how)]
    parts += [
        f"## Licence\n\nLicence of the model that this was made from: {origin.licence or 'not stated'}.",
        f"## Files\n\n`{SUMS}` has the SHA-256 of every file: `sha256sum -c {SUMS}` compares them.",
    ]
    front = f"---\n{how.front.strip()}\n---\n\n" if how.front else ""
    return front + "\n\n".join(part for part in parts if part) + "\n"


def _what(form: Form, artifact: Artifact, origin: Origin) -> str:
    facts = artifact.manifest.facts
    words = f"A model for {artifact.manifest.task}, packaged by smelt as `{form.name}`: {form.summary}."
    lines = ["| | |", "|---|---|", f"| made from | {origin.model or 'not known here'} |"]
    lines += [f"| run | {origin.run} |"] if origin.run else []
    target = f", exported for {facts['target']}" if facts.get("target") else ""
    lines += [f"| format | {artifact.format}{target} |"]
    lines += [f"| parameters | {facts['parameters']:,} |"] if facts.get("parameters") else []
    lines += [f"| artifact | `{artifact.key}` |"]
    return f"{words}\n\n" + "\n".join(lines)


def _steps(origin: Origin) -> str:
    if not origin.steps:
        return ""
    lines = ["## What was done to it", "", "| step | stage | settings |", "|---|---|---|"]
    lines += [f"| {step.name} | {step.stage} | {_settings(step.settings)} |" for step in origin.steps]
    return "\n".join(lines)


def _settings(values: Mapping[str, Any]) -> str:
    shown = (textwrap.shorten(json.dumps(v, ensure_ascii=False), _LONGEST) for v in values.values())
    return ", ".join(f"{k}: {v}" for k, v in zip(values, shown, strict=True)).replace("|", "\\|") or "–"


def _scores(origin: Origin) -> str:
    if not origin.scores:
        where = "of its run" if origin.run else "of an artifact without its run"
        return f"## Scores\n\nThe scores {where} are not known. `smelt eval` scores it on data of your own."
    lines = [
        "## Scores",
        "",
        "| metric | value [95 % interval] | n | the untouched model |",
        "|---|---|---|---|",
    ]
    lines += [f"| {s.metric} | {s.text} | {s.n:,} | {s.baseline or '–'} |" for s in origin.scores]
    lines += ["", *(f"- {s.metric}: `{s.signature}`" for s in origin.scores)]
    lines += ["", *(f"- {line}" for line in origin.times)] if origin.times else []
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
