"""Check whether a package format supports an artifact; if not, suggest artifacts and formats that fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.files import read_json_object
from smelt.core.text import with_article
from smelt.export.package.package_format import PackageFormat


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
    takes, manifest = package_format.supported, artifact.manifest
    made, target = artifact.format, manifest.details.get("target")
    if takes.tasks is not None and manifest.task not in takes.tasks:
        return UnsupportedFormat(
            "unsupported-task",
            f"its task is {manifest.task}; this format supports {_join_words(takes.tasks)}.",
        )
    family = read_json_object(artifact.path / "config.json").get("model_type")
    if takes.families is not None and family not in takes.families:
        text = f"its model family is {family}; this format supports {_join_words(takes.families)}."
        return UnsupportedFormat("unsupported-family", text)
    if made not in takes.formats:
        text = f"it is {with_article(made)} artifact; this format supports {_join_words(takes.formats)}."
        return UnsupportedFormat("unsupported-format", text, needs_export=True)
    if takes.targets is not None and target not in takes.targets:
        text = f"it was exported for {target}; this format supports {_join_words(takes.targets)}."
        return UnsupportedFormat("unsupported-target", text, needs_export=True)
    try:
        package_format.check(artifact)
    except InputError as error:
        return UnsupportedFormat(error.code, str(error))
    return None


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
    why = unsupported_format(package_format, artifact)
    if why is None:
        return
    said = [f"{name} cannot be packaged as '{package_format.name}': {why.text.strip()}"]
    if others := [step for step, other in run.items() if unsupported_format(package_format, other) is None]:
        steps = f"step{'s' * (len(others) > 1)} {_join_words(others)}"
        said.append(f"This format supports the {steps} of the same run (artifacts/{others[0]}).")
    elif why.needs_export and package_format.supported.hint:
        said.append(package_format.supported.hint)
    if fitting := [other.name for other in forms if unsupported_format(other, artifact) is None]:
        said.append(f"Formats that support this artifact: {', '.join(fitting)} (--format).")
    raise InputError(" ".join(said), code=why.code)


def _join_words(words: Iterable[str]) -> str:
    """Return "a", "a and b", or "a, b and c"; a set in alphabetical order."""
    found = sorted(words) if isinstance(words, frozenset) else list(words)
    return " and ".join([", ".join(found[:-1]), found[-1]]) if len(found) > 1 else "".join(found)
