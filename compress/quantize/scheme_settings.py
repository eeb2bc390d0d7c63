"""The scheme of `quantize` and the options of all schemes, as settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from pydantic import Field, create_model, model_validator

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

# the parts of a model that may have a scheme each
ModelPart = Literal["encoder", "decoder"]
MODEL_PARTS: tuple[ModelPart, ...] = get_args(ModelPart)


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


def check_scheme_options(
    names: Sequence[str], settings: Settings, scheme_names: str, mixed: bool, tables: Sequence[str] = ()
) -> None:
    """Raise an error for options that none of these schemes has, and for values that they do not allow.

    Args:
        names: names of the schemes of linear layers.
        settings: settings with every option of every scheme.
        scheme_names: a description of the schemes for messages.
        mixed: whether the schemes are the bit widths of mixed precision.
        tables: names of the schemes of embeddings and output layer.

    Raises:
        SettingError: an option or value does not fit.
    """
    schemes = [SCHEMES[name] for name in dict.fromkeys((*names, *tables))]
    used = {option.name for scheme in schemes for option in scheme.option_specs}
    for name in schemes_by_option():
        if name in settings.model_fields_set and name not in used:
            raise SettingError(f"{name} has no effect on {scheme_names}; remove it", code="unused-setting")
    of_linear_layers = {option.name for name in names for option in SCHEMES[name].option_specs}
    for scheme in schemes:
        for option in scheme.option_specs:
            value = getattr(settings, option.name)
            if value is None or option.allows(value):
                continue
            if scheme.name not in names and option.name in of_linear_layers:
                continue  # the value is for the linear layers; embeddings keep their scheme's default
            shown, *allowed = map(format_option_value, (value, *option.allowed))
            scope = f"{scheme.bits}-bit weights" if mixed else f"scheme {scheme.name}"
            expected = f"expected one of {', '.join(allowed)}"
            raise SettingError(
                option.rejection or f"{option.name} {shown} is not for {scope}; {expected}",
                code="wrong-value",
            )


def resolve_options(
    scheme: str, settings: Settings, linear_schemes: Sequence[str] = ()
) -> dict[str, OptionValue]:
    """Return the options of `scheme` from `settings`, with defaults where a value is for another scheme.

    linear_schemes: those of linear layers, if `scheme` may be that of embeddings alone.
    """
    of_others = (
        {option.name for name in linear_schemes for option in SCHEMES[name].option_specs}
        if scheme not in linear_schemes
        else set()
    )
    return {
        option.name: option.default
        if option.own_only and option.name in of_others
        else _resolve_option(option, getattr(settings, option.name))
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


EMBEDDING_SCHEME = (
    f"scheme of embeddings and output layer; default {_default_tables()}, else the scheme (of the decoder)"
)


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


class PartSchemes(Settings):
    """One scheme for the linear layers, or one for each part of a model."""

    scheme: str | dict[ModelPart, str]

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        named_parts = MODEL_PARTS if isinstance(self.scheme, str) else self.scheme
        if missing := [part for part in MODEL_PARTS if part not in named_parts]:
            raise SettingError(
                f"scheme {self.scheme_text} has no scheme for the {' and the '.join(missing)}; add"
                f" {', '.join(f'{part}: {DEFAULT_SCHEME}' for part in missing)}. Use exclude for a part that"
                " is kept in float",
                code="missing-part",
            )
        return self

    def scheme_of(self, part: ModelPart) -> str:
        """Return the scheme of the linear layers of `part`; of a model without parts, any `part`."""
        return self.scheme if isinstance(self.scheme, str) else self.scheme[part]

    @property
    def scheme_text(self) -> str:
        """The setting `scheme` as in a recipe."""
        if isinstance(self.scheme, str):
            return self.scheme
        return f"{{{', '.join(f'{part}: {name}' for part, name in self.scheme.items())}}}"


def scheme_settings(schemes: Sequence[str], default: str, base: type[Settings] = Settings) -> Any:
    """Return a class of settings with `scheme`, one of `schemes`, and the options that these have.

    base: the base class; with PartSchemes, `scheme` may be a mapping.
    """
    options = {
        name: [(scheme, option) for scheme, option in pairs if scheme.name in schemes]
        for name, pairs in schemes_by_option().items()
    }
    name: Any = Literal[tuple(schemes)]
    kind, description = name, "format of the weights"
    if base is PartSchemes:
        kind = name | dict[ModelPart, name]
        description += "; encoder-decoder: also a mapping, {encoder: SCHEME, decoder: SCHEME}"
    scheme = (kind, Field(default=default, description=description))
    fields: Any = {"scheme": scheme, **{n: _option_field(pairs) for n, pairs in options.items() if pairs}}
    return create_model("FromSchemes", __base__=base, **fields)


if TYPE_CHECKING:
    EmbeddingScheme = str

    class SchemeSettings(Settings):
        """The scheme, and the options of all of them."""

        scheme: str

    PartSchemeSettings = PartSchemes
else:
    EmbeddingScheme = Literal[_EMBEDDING_SCHEMES]
    PartSchemeSettings = scheme_settings(tuple(SCHEMES), DEFAULT_SCHEME, PartSchemes)
