"""The scheme of `quantize` and the options of all schemes, as settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model

from smelt.core.errors import SettingError
from smelt.core.messages import Message, warning
from smelt.quantization.groupwise import ACTIVATION_BITS
from smelt.quantization.scheme import OptionValue, Scheme, SchemeOption, SchemeOptions
from smelt.quantization.schemes.registry import (
    DEFAULT_SCHEME,
    SCHEMES,
    format_option_value,
    schemes_by_option,
)
from smelt.stage import Settings


def simulated_activation_warnings(schemes: Mapping[str, SchemeOptions]) -> list[Message]:
    """Return a warning if activations are rounded to fewer bits than any operator has.

    schemes: the options of each scheme in use.
    """
    names = [name for name, options in schemes.items() if SCHEMES[name].simulates_activations(options)]
    text = (
        "activation_bits: 4: no runtime multiplies 4-bit activations. Those of"
        f" {' and '.join(names)} are rounded to 4 bits and multiplied in float32, so they show the accuracy"
        " of such hardware and save neither time nor memory. For speed use activation_bits: 8."
    )
    return [warning("simulated-activations", text, setting=ACTIVATION_BITS.name)] if names else []


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
    return {
        name: option_values[0]
        for name, option_values in values.items()
        if option_values and option_values.count(option_values[0]) == len(option_values)
    }


def unused_options(schemes: Iterable[str], settings: Settings) -> set[str]:
    """Return options that no scheme has, and unset ones whose defaults differ between schemes."""
    shared = shared_options(schemes, settings)
    return {
        name
        for name, option_values in _option_values(schemes, settings).items()
        if not option_values or (name not in shared and name not in settings.model_fields_set)
    }


def _option_values(schemes: Iterable[str], settings: Settings) -> dict[str, list[OptionValue]]:
    resolved = [resolve_options(scheme, settings) for scheme in schemes]
    return {name: [options[name] for options in resolved if name in options] for name in schemes_by_option()}


def _resolve_option(option: SchemeOption, value: OptionValue | None) -> OptionValue:
    return value if value is not None and option.allows(value) else option.default


_EMBEDDING_SCHEMES = tuple(name for name, scheme in SCHEMES.items() if scheme.supports_embeddings)


def _default_tables() -> str:
    """Return the default embedding schemes, each with the linear layer schemes that use it."""
    by_table: dict[str, list[str]] = {}
    for name, scheme in SCHEMES.items():
        if scheme.embedding_scheme:
            by_table.setdefault(scheme.embedding_scheme, []).append(name)
    return ", ".join(f"{table} with {', '.join(names)}" for table, names in by_table.items())


EMBEDDING_SCHEME = f"scheme of embeddings and output layer; default {_default_tables()}, else the scheme"


def _option_field(options: list[tuple[Scheme, SchemeOption]]) -> tuple[Any, Any]:
    """Return type and field of an option of these schemes; None is each scheme's default."""
    option = options[0][1]
    values = {value: None for _, spec in options for value in spec.allowed}
    kind: Any = bool if all(isinstance(value, bool) for value in values) else Literal[tuple(values)]
    takes: dict[str, list[str]] = {}
    for scheme, spec in options:
        allowed = (
            ""
            if set(spec.allowed) == set(values)
            else f"{', '.join(map(format_option_value, spec.allowed))}; "
        )
        takes.setdefault(f"{allowed}default {format_option_value(spec.default)}", []).append(scheme.name)
    notes = ". ".join(f"{', '.join(names)}: {text}" for text, names in takes.items())
    return kind | None, Field(default=None, description=f"{option.description}. {notes}")


def scheme_settings(schemes: Sequence[str], default: str) -> Any:
    """Return a class of settings with `scheme`, one of `schemes`, and the options that these have."""
    options = {
        name: [(scheme, option) for scheme, option in pairs if scheme.name in schemes]
        for name, pairs in schemes_by_option().items()
    }
    scheme = (Literal[tuple(schemes)], Field(default=default, description="format of the weights"))
    fields: Any = {"scheme": scheme, **{n: _option_field(pairs) for n, pairs in options.items() if pairs}}
    return create_model("FromSchemes", __base__=Settings, **fields)


if TYPE_CHECKING:
    EmbeddingScheme = str

    class SchemeSettings(Settings):
        """The scheme, and the options of all of them."""

        scheme: str
else:
    EmbeddingScheme = Literal[_EMBEDDING_SCHEMES]
    SchemeSettings = scheme_settings(tuple(SCHEMES), DEFAULT_SCHEME)
