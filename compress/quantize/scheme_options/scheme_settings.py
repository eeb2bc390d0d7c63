"""The options of all schemes as settings fields, each with the schemes that have it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model

from smelt.core.stage import Settings
from smelt.runtime.schemes.registry import DEFAULT_SCHEME, SCHEMES, format_option_value, schemes_by_option
from smelt.runtime.schemes.scheme import Scheme, SchemeOption

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
    """Return type and field of an option of these schemes; None stands for each scheme's default."""
    option = found[0][1]
    values = {value: None for _, one in found for value in one.allowed}
    kind: Any = bool if all(isinstance(value, bool) for value in values) else Literal[tuple(values)]
    takes: dict[str, list[str]] = {}
    for scheme, one in found:
        allowed = (
            "" if set(one.allowed) == set(values) else f"{', '.join(map(format_option_value, one.allowed))}; "
        )
        takes.setdefault(f"{allowed}default {format_option_value(one.default)}", []).append(scheme.name)
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
