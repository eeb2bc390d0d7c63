"""The forms of package. A new one is its file and a line here."""

from __future__ import annotations

from smelt.core.errors import InputError, nearest
from smelt.export.package.form import Form
from smelt.export.package.genai import Genai
from smelt.export.package.huggingface import HuggingFace
from smelt.export.package.one_file.form import OneFile
from smelt.export.package.optimum import Optimum
from smelt.export.package.standalone.form import Standalone
from smelt.export.package.transformers_js import TransformersJs
from smelt.export.package.triton.form import Triton

FORMS: dict[str, Form] = {
    form.name: form
    for form in (Standalone(), OneFile(), Optimum(), TransformersJs(), Genai(), Triton(), HuggingFace())
}  # fmt: skip
DEFAULT = "standalone"


def find_form(name: str) -> Form:
    """Return the form `name`.

    Raises:
        InputError: there is none.
    """
    if name not in FORMS:
        raise InputError(
            f"unknown package format '{name}'. Known: {', '.join(FORMS)}.{nearest(name, FORMS)}",
            code="unknown-package-format",
        )
    return FORMS[name]
