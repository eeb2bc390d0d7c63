"""The options of all schemes as settings, each once, with the names of the schemes that have it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model

from smelt.core.stage import Settings
from smelt.runtime.schemes.registry import DEFAULT, SCHEMES, options_of_all, worded
from smelt.runtime.schemes.scheme import Option, Scheme

_TABLES = tuple(name for name, scheme in SCHEMES.items() if scheme.tables)


def _default_tables() -> str:
    """Return the default schemes of embeddings, each with the schemes of linear layers that it goes with."""
    found: dict[str, list[str]] = {}
    for name, scheme in SCHEMES.items():
        if scheme.vocabulary:
            found.setdefault(scheme.vocabulary, []).append(name)
    return ", ".join(f"{table} with {', '.join(names)}" for table, names in found.items())


EMBEDDING_SCHEME = f"scheme of embeddings and output layer; default {_default_tables()}, else the scheme"


def _field(found: list[tuple[Scheme, Option]]) -> tuple[Any, Any]:
    """Return type and field of an option that these schemes have; None is each scheme's own default."""
    option = found[0][1]
    values = {value: None for _, one in found for value in one.allowed}
    kind: Any = bool if all(isinstance(value, bool) for value in values) else Literal[tuple(values)]
    takes: dict[str, list[str]] = {}
    for scheme, one in found:
        allowed = "" if set(one.allowed) == set(values) else f"{', '.join(map(worded, one.allowed))}; "
        takes.setdefault(f"{allowed}default {worded(one.default)}", []).append(scheme.name)
    notes = ". ".join(f"{', '.join(names)}: {text}" for text, names in takes.items())
    return kind | None, Field(default=None, description=f"{option.description}. {notes}")


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
        scheme=(Literal[tuple(SCHEMES)], Field(default=DEFAULT, description="format of the weights")),
        **{name: _field(found) for name, found in options_of_all().items()},
    )
