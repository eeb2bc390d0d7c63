"""Whether a form takes an artifact; if not, what of the run it does take, and which form does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.files import read_json
from smelt.core.text import article
from smelt.export.package.form import Form


class Refusal(NamedTuple):
    """Why a form does not take an artifact.

    code, text: of the error. of_export: whether another export of the model may be taken.
    """

    code: str
    text: str
    of_export: bool = False


def refusal(form: Form, artifact: Artifact) -> Refusal | None:
    """Return why `form` does not take `artifact`; None where it does.

    What no export changes is asked first: a step that is no help is not proposed.
    """
    takes, manifest = form.takes, artifact.manifest
    made, target = artifact.format, manifest.details.get("target")
    if takes.tasks is not None and manifest.task not in takes.tasks:
        return Refusal(
            "unsupported-task", f"it is for {manifest.task}; this form takes {_listed(takes.tasks)}."
        )
    family = read_json(artifact.path / "config.json").get("model_type")
    if takes.families is not None and family not in takes.families:
        text = f"it is a model of the family {family}; this form takes {_listed(takes.families)}."
        return Refusal("unsupported-family", text)
    if made not in takes.formats:
        text = f"it is {article(made)} artifact; this form takes {_listed(takes.formats)}."
        return Refusal("unsupported-format", text, of_export=True)
    if takes.targets is not None and target not in takes.targets:
        text = f"it was exported for {target}; this form takes {_listed(takes.targets)}."
        return Refusal("unsupported-target", text, of_export=True)
    try:
        form.check(artifact)
    except InputError as error:
        return Refusal(error.code, str(error))
    return None


def require_fit(
    form: Form, artifact: Artifact, name: str, forms: Iterable[Form], run: Mapping[str, Artifact]
) -> None:
    """Require that `form` takes `artifact`, which the user knows as `name`.

    Args:
        form: the one that is asked for.
        artifact: what is to be packaged.
        name: the path that the user gave.
        forms: all that there are.
        run: the other artifacts of the same run, by their steps.

    Raises:
        InputError: it does not; names what it takes of this run, and the forms that take the artifact.
    """
    why = refusal(form, artifact)
    if why is None:
        return
    said = [f"{name} cannot be packaged as '{form.name}': {why.text.strip()}"]
    if others := [step for step, other in run.items() if refusal(form, other) is None]:
        steps = f"step{'s' * (len(others) > 1)} {_listed(others)}"
        said.append(f"Of the same run it takes the {steps} (artifacts/{others[0]}).")
    elif why.of_export and form.takes.mend:
        said.append(form.takes.mend)
    if fitting := [other.name for other in forms if refusal(other, artifact) is None]:
        said.append(f"Formats that support this artifact: {', '.join(fitting)} (--format).")
    raise InputError(" ".join(said), code=why.code)


def _listed(words: Iterable[str]) -> str:
    """Return "a", "a and b", "a, b and c"; a set in the order of its letters."""
    found = sorted(words) if isinstance(words, frozenset) else list(words)
    return " and ".join([", ".join(found[:-1]), found[-1]]) if len(found) > 1 else "".join(found)
