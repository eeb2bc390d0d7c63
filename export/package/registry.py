"""The package formats. A new format is one file and one line here."""

from __future__ import annotations

from smelt.core.errors import InputError, did_you_mean
from smelt.export.package.genai import GenaiFormat
from smelt.export.package.huggingface import HuggingFaceFormat
from smelt.export.package.one_file.one_file_format import OneFileFormat
from smelt.export.package.optimum import OptimumFormat
from smelt.export.package.package_format import PackageFormat
from smelt.export.package.standalone.standalone_format import StandaloneFormat
from smelt.export.package.transformers_js import TransformersJsFormat
from smelt.export.package.triton.triton_format import TritonFormat

PACKAGE_FORMATS: dict[str, PackageFormat] = {
    form.name: form
    for form in (
        StandaloneFormat(), OneFileFormat(), OptimumFormat(), TransformersJsFormat(), GenaiFormat(),
        TritonFormat(), HuggingFaceFormat(),
    )
}  # fmt: skip


def find_package_format(name: str) -> PackageFormat:
    """Return the format `name`.

    Raises:
        InputError: there is none.
    """
    if name not in PACKAGE_FORMATS:
        raise InputError(
            f"unknown package format '{name}'. Available:"
            f" {', '.join(PACKAGE_FORMATS)}.{did_you_mean(name, PACKAGE_FORMATS)}",
            code="unknown-package-format",
        )
    return PACKAGE_FORMATS[name]
