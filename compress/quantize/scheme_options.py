"""The options of quantization schemes: settings fields, validation, defaults, and the table for the help."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model

from smelt.core.errors import SettingError
from smelt.core.messages import Message, warning
from smelt.core.stage import Settings
from smelt.quantization.scheme import OptionValue, Scheme, SchemeOption
from smelt.quantization.schemes.registry import (
    DEFAULT_SCHEME,
    SCHEMES,
    bits_per_weight,
    default_options,
    format_option,
    format_option_value,
    schemes_by_option,
    supported_targets,
)


def check_scheme_options(names: Sequence[str], settings: Settings, scheme_names: str, mixed: bool) -> None:
    """Raise an error for options that none of these schemes has, and for values that they do not allow.

    Args:
        names: names of the schemes in use.
        settings: settings with every option of every scheme.
        scheme_names: a description of the schemes for messages.
        mixed: whether the schemes are the bit widths of mixed precision.

    Raises:
        SettingError: an option or value does not fit.
    """
    schemes = [SCHEMES[name] for name in names]
    used = {option.name for scheme in schemes for option in scheme.option_specs}
    for name in schemes_by_option():
        if name in settings.model_fields_set and name not in used:
            raise SettingError(f"{name} has no effect on {scheme_names}; remove it", code="unused-setting")
    main = {option.name: option for option in schemes[0].option_specs}
    for scheme in schemes:
        for option in scheme.option_specs:
            value = getattr(settings, option.name)
            if value is None or option.allows(value):
                continue
            if not mixed and scheme is not schemes[0] and option.name in main:
                continue  # the value is for the linear layers; embeddings keep their scheme's default
            shown, *allowed = map(format_option_value, (value, *option.allowed))
            scope = f"{scheme.bits}-bit weights" if mixed else f"scheme {scheme.name}"
            expected = f"expected one of {', '.join(allowed)}"
            raise SettingError(
                option.rejection or f"{option.name} {shown} is not for {scope}; {expected}",
                code="wrong-value",
            )


def resolve_options(scheme: str, settings: Settings) -> dict[str, OptionValue]:
    """Return the options of `scheme` from `settings`, with defaults where a value is for another scheme."""
    return {
        option.name: _resolve_option(option, getattr(settings, option.name))
        for option in SCHEMES[scheme].option_specs
    }


def shared_options(schemes: Iterable[str], settings: Settings) -> dict[str, OptionValue]:
    """Return the options that have the same value in all of `schemes` that have them."""
    values = _option_values(schemes, settings)
    return {name: found[0] for name, found in values.items() if found and found.count(found[0]) == len(found)}


def unused_options(schemes: Iterable[str], settings: Settings) -> set[str]:
    """Return options that no scheme has, and unset ones whose defaults differ between schemes."""
    same = shared_options(schemes, settings)
    return {
        name
        for name, found in _option_values(schemes, settings).items()
        if not found or (name not in same and name not in settings.model_fields_set)
    }


def _option_values(schemes: Iterable[str], settings: Settings) -> dict[str, list[OptionValue]]:
    taken = [resolve_options(scheme, settings) for scheme in schemes]
    return {name: [options[name] for options in taken if name in options] for name in schemes_by_option()}


def _resolve_option(option: SchemeOption, value: OptionValue | None) -> OptionValue:
    return value if value is not None and option.allows(value) else option.default


_EMBEDDING_SCHEMES = tuple(name for name, scheme in SCHEMES.items() if scheme.supports_embeddings)


def _default_tables() -> str:
    """Return the default embedding schemes, each with the linear layer schemes that use it."""
    found: dict[str, list[str]] = {}
    for name, scheme in SCHEMES.items():
        if scheme.embedding_scheme:
            found.setdefault(scheme.embedding_scheme, []).append(name)
    return ", ".join(f"{table} with {', '.join(names)}" for table, names in found.items())


EMBEDDING_SCHEME = f"scheme of embeddings and output layer; default {_default_tables()}, else the scheme"


def _option_field(found: list[tuple[Scheme, SchemeOption]]) -> tuple[Any, Any]:
    """Return type and field of an option of these schemes; None is each scheme's default."""
    option = found[0][1]
    values = {value: None for _, spec in found for value in spec.allowed}
    kind: Any = bool if all(isinstance(value, bool) for value in values) else Literal[tuple(values)]
    takes: dict[str, list[str]] = {}
    for scheme, spec in found:
        allowed = (
            ""
            if set(spec.allowed) == set(values)
            else f"{', '.join(map(format_option_value, spec.allowed))}; "
        )
        takes.setdefault(f"{allowed}default {format_option_value(spec.default)}", []).append(scheme.name)
    notes = ". ".join(f"{', '.join(names)}: {text}" for text, names in takes.items())
    return kind | None, Field(default=None, description=f"{option.description}. {notes}")


if TYPE_CHECKING:
    EmbeddingScheme = str

    class SchemeSettings(Settings):
        """The scheme, and the options of all of them."""

        scheme: str
else:
    EmbeddingScheme = Literal[_EMBEDDING_SCHEMES]
    SchemeSettings = create_model(
        "FromSchemes",
        __base__=Settings,
        scheme=(Literal[tuple(SCHEMES)], Field(default=DEFAULT_SCHEME, description="format of the weights")),
        **{name: _option_field(found) for name, found in schemes_by_option().items()},
    )


def two_bit_warnings(schemes: Iterable[str]) -> list[Message]:
    """Return a warning if two-bit schemes are among `schemes`, by name."""
    few = sorted(name for name in schemes if SCHEMES[name].bits == 2)
    return [
        warning(
            "hqq-two-bits",
            "method: hqq clips the range of the weights, which lowers the quality of most models with"
            f" {name} (docs/reference/stages/quantize.md#hqq). Compare with method: rtn, or with"
            " gptq if there are samples.",
            setting="method",
        )
        for name in few
    ]


# columns and their widths; with two spaces before each, 79 in total
_COLUMNS = {"scheme": 14, "bits": 4, "data": 4, "training": 8, "runtimes": 16, "pays": 21}


def scheme_table() -> str:
    """Return the table, each line indented by two spaces, and an explanation of its columns."""
    rows = [list(_COLUMNS), *(_row_cells(scheme) for scheme in SCHEMES.values())]
    lines = [line for row in rows for line in _wrap_row(row)]
    explanation = (
        "bits: per weight, scales and zero points included, with the default options. data:"
        " calibration samples. training: whether training after quantization is needed. runtimes: targets of"
        f" `onnx`; torch runs all schemes. pays: where the scheme is useful.{_restricted_schemes()}"
    )
    return "\n".join(lines) + "\n\n" + explanation


def _restricted_schemes() -> str:
    """Return sentences about schemes that a runtime supports only with certain options."""
    sentences = [
        f" For {target}, {scheme.name} needs"
        f" {' and '.join(format_option(*option) for option in only.items())}."
        for scheme in SCHEMES.values()
        for target, only in scheme.required_options.items()
    ]
    return "".join(sentences).replace("`", "")


def _row_cells(scheme: Scheme) -> list[str]:
    return [
        scheme.name,
        f"{bits_per_weight(scheme, default_options(scheme)):.3g}",
        "yes" if scheme.requires_calibration else "none",
        "needed" if scheme.requires_training else "none",
        ", ".join(supported_targets([scheme])) or "torch only",
        scheme.recommended_for,
    ]


def _wrap_row(cells: list[str]) -> list[str]:
    """Return the lines of a table row, with cells wrapped to their column widths."""
    wrapped = [
        textwrap.wrap(cell, width, break_on_hyphens=False)
        for cell, width in zip(cells, _COLUMNS.values(), strict=True)
    ]
    return [
        "".join(f"  {part:{width}}" for part, width in zip(parts, _COLUMNS.values(), strict=True)).rstrip()
        for parts in zip_longest(*wrapped, fillvalue="")
    ]
