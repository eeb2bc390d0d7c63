"""One graph of a model, before it is traced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Graph:
    """One graph to export: the module, its example inputs, and the names on its outside.

    module: has `attentions`, its `AttentionModule`s. axes: for each input the names of its dynamic
    dimensions, by place. optional: inputs that may be left out, with the value that they have then.
    """

    name: str
    module: Any
    inputs: tuple[Any, ...]
    input_names: list[str]
    output_names: list[str]
    axes: tuple[Any, ...]
    optional: Mapping[str, int] = field(default_factory=dict)
