"""Validation and resolution of scheme options for the schemes of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from smelt.core.errors import SettingError
from smelt.core.stage import Settings
from smelt.runtime.schemes.registry import SCHEMES, format_option_value, schemes_by_option
from smelt.runtime.schemes.scheme import OptionValue, SchemeOption


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
            said, *allowed = map(format_option_value, (value, *option.allowed))
            one = f"{scheme.bits}-bit weights" if mixed else f"scheme {scheme.name}"
            expected = f"expected one of {', '.join(allowed)}"
            raise SettingError(
                option.others or f"{option.name} {said} is not for {one}; {expected}", code="wrong-value"
            )


def resolve_options(scheme: str, settings: Settings) -> dict[str, OptionValue]:
    """Return the options of `scheme` from `settings`, with defaults where a value is for another scheme."""
    return {
        one.name: _resolve_option(one, getattr(settings, one.name)) for one in SCHEMES[scheme].option_specs
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


def _resolve_option(option: SchemeOption, said: OptionValue | None) -> OptionValue:
    return said if said is not None and option.allows(said) else option.default
