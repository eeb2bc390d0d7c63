"""Has a model codes before any stage: a checkpoint that somebody else coded, or an artifact of smelt?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.files import load_json
from smelt.runtime.models.coded.said import coding_of
from smelt.runtime.schemes.registry import SCHEMES, TAKEN, defaults, refusal, unfit
from smelt.runtime.schemes.scheme import TARGETS, Options


@dataclass(frozen=True)
class CodedModel:
    """Codes that a model has before any stage.

    said: what they are called. schemes: the options of each, the one that most matrices have first. again:
    what to start from where floats are asked for.
    """

    said: str
    schemes: Mapping[str, Options]
    again: str

    def refused_by(self, target: str) -> str | None:
        """Return what of the codes no graph for `target` can hold; None where it can hold all."""
        known = ((SCHEMES[name], options) for name, options in self.schemes.items())
        words = [one.leaves_as for one, own in known if refusal(one, target) or unfit(one, own, target)]
        return " and ".join(words) or None

    @property
    def targets(self) -> list[str]:
        """The targets of export that run them."""
        return [target for target in TARGETS if self.refused_by(target) is None]


def coded_model(folder: Path, config: Mapping[str, Any]) -> CodedModel | None:
    """Return the codes of the model in `folder`; None where its weights are floats, or cannot be read.

    config: its Hugging Face config.
    """
    try:
        coding = coding_of(config)
    except InputError:  # said of the model
        return None
    if coding is not None:
        taken = {TAKEN: defaults(SCHEMES[TAKEN])}
        return CodedModel(coding.method, taken, "the model that these were made of")
    found = list(_quantized(folder))
    counted = Counter(name for name, _ in found)
    options = dict(found)
    schemes = {name: options[name] for name, _ in counted.most_common()}
    again = "an artifact of before `quantize`"
    return CodedModel(" and ".join(schemes), schemes, again) if schemes else None


def _quantized(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield scheme and options of each matrix that smelt has coded."""
    try:
        edits = load_json(folder / "structure.json")["edits"]
        coded = [edit for edit in edits if edit["op"] == "quantize"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return  # there is none; what is wrong with one says who loads the model
    for edit in coded:
        if edit.get("scheme") in SCHEMES:
            options = {name: value for name, value in edit.items() if name not in ("op", "module", "scheme")}
            yield str(edit["scheme"]), options
