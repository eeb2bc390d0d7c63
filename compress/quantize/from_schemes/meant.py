"""What the options of schemes that a recipe says, or does not say, mean to the schemes of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from smelt.core.errors import SettingError
from smelt.core.stage import Settings
from smelt.runtime.schemes.registry import SCHEMES, options_of_all, worded
from smelt.runtime.schemes.scheme import Option, Value


def check_options(names: Sequence[str], settings: Settings, who: str, mixed: bool) -> None:
    """Refuse options that none of these schemes has, and values that theirs do not take.

    Args:
        names: of the schemes in use.
        settings: with every option of every scheme.
        who: what to call them all.
        mixed: whether each is one of several widths.

    Raises:
        ValueError: there is one.
    """
    schemes = [SCHEMES[name] for name in names]
    used = {option.name for scheme in schemes for option in scheme.settings}
    for name in options_of_all():
        if name in settings.model_fields_set and name not in used:
            raise SettingError(f"{name} means nothing to {who}; remove it", code="unused-setting")
    main = {option.name: option for option in schemes[0].settings}
    for scheme in schemes:
        for option in scheme.settings:
            value = getattr(settings, option.name)
            if value is None or option.allows(value):
                continue
            if not mixed and scheme is not schemes[0] and option.name in main:
                continue  # the value is for the linear layers; embeddings keep their scheme's default
            said, *allowed = map(worded, (value, *option.allowed))
            one = f"{scheme.bits}-bit weights" if mixed else f"scheme {scheme.name}"
            expected = f"expected one of {', '.join(allowed)}"
            raise SettingError(
                option.others or f"{option.name} {said} is not for {one}; {expected}", code="wrong-value"
            )


def options_for(scheme: str, settings: Settings) -> dict[str, Value]:
    """Return the options of `scheme`, its own default where what `settings` says is for another one."""
    return {one.name: _heard(one, getattr(settings, one.name)) for one in SCHEMES[scheme].settings}


def taken_by(schemes: Iterable[str], settings: Settings) -> dict[str, Value]:
    """Return the options that all of `schemes` that have them take alike, as these take them."""
    values = _values(schemes, settings)
    return {name: found[0] for name, found in values.items() if found and found.count(found[0]) == len(found)}


def unused_by(schemes: Iterable[str], settings: Settings) -> set[str]:
    """Return the options that none of `schemes` has, or each as its own default, unless they were said."""
    same = taken_by(schemes, settings)
    return {
        name
        for name, found in _values(schemes, settings).items()
        if not found or (name not in same and name not in settings.model_fields_set)
    }


def _values(schemes: Iterable[str], settings: Settings) -> dict[str, list[Value]]:
    taken = [options_for(scheme, settings) for scheme in schemes]
    return {name: [options[name] for options in taken if name in options] for name in options_of_all()}


def _heard(option: Option, said: Value | None) -> Value:
    return said if said is not None and option.allows(said) else option.default
