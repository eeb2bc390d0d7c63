"""The options of all schemes as settings, each once, with the names of the schemes that have it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model

from smelt.core.stage import Settings
from smelt.runtime.schemes.registry import DEFAULT, SCHEMES, options_of_all, worded
from smelt.runtime.schemes.scheme import Option, Scheme, Value

_TABLES = tuple(name for name, scheme in SCHEMES.items() if scheme.tables)
_OTHERS = [f"{scheme.vocabulary} under {name}" for name, scheme in SCHEMES.items() if scheme.vocabulary]
# which scheme embeddings and head have where none is named
VOCABULARY = f"scheme of embeddings and head; unless given, {', '.join([*_OTHERS, 'else the scheme'])}"


def _field(found: list[tuple[Scheme, Option]]) -> tuple[Any, Any]:
    """Return type and field of an option that these schemes have.

    Where one came later with another default, keys of before have that of those who had it first.
    """
    option = next((one for _, one in found if not one.later), found[0][1])
    values = {value: None for _, one in found for value in one.allowed}
    kind: Any = bool if all(isinstance(value, bool) for value in values) else Literal[tuple(values)]
    narrower: dict[tuple[Value, ...], list[str]] = {}
    for scheme, one in found:
        if len(one.allowed) < len(values):
            narrower.setdefault(one.allowed, []).append(scheme.name)
    text = f"{', '.join(scheme.name for scheme, _ in found)}: {option.description}"
    own = {scheme.name: one.default for scheme, one in found if one.default != option.default}
    notes = [
        f"{', '.join(names)}: {', '.join(map(worded, allowed))}"
        + (f", unless given {own[names[0]]}" if names[0] in own else "")
        for allowed, names in narrower.items()
    ]
    return kind, Field(default=option.default, description=f"{text} ({'; '.join(notes)})" if notes else text)


if TYPE_CHECKING:
    TableScheme = str

    class FromSchemes(Settings):
        """The scheme, and the options of all of them."""

        scheme: str
else:
    TableScheme = Literal[_TABLES]
    FromSchemes = create_model(
        "FromSchemes",
        __base__=Settings,
        scheme=(Literal[tuple(SCHEMES)], DEFAULT),
        **{name: _field(found) for name, found in options_of_all().items()},
    )
