"""One graph of a model, before it is traced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class GraphSpec:
    """One graph to export: the module, its example inputs, and the names of inputs and outputs.

    module: has `attentions`, its `AttentionModule`s. dynamic_axes: for each input the names of its dynamic
    dimensions, by index. input_defaults: optional inputs, with their default values.
    """

    name: str
    module: Any
    inputs: tuple[Any, ...]
    input_names: list[str]
    output_names: list[str]
    dynamic_axes: tuple[Any, ...]
    input_defaults: Mapping[str, int] = field(default_factory=dict)
