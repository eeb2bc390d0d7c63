"""Share of samples whose outputs are within a tolerance of the original graph's, by output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from smelt.evaluate.metrics.metric import (
    ComparedArrays,
    ExampleRows,
    Metric,
    OutputShapes,
    Rows,
    require_graph_outputs,
)
from smelt.stage import Settings


class Tolerance(Settings):
    """The tolerance of an output."""

    rtol: float = Field(default=1e-2, ge=0, description="relative to the original's value")
    atol: float = Field(default=1e-3, ge=0, description="added to it, in the output's unit")


class AllcloseSettings(Tolerance):
    """Settings of `allclose`."""

    outputs: dict[str, Tolerance | None] = Field(
        default_factory=dict, description="tolerances of single outputs, by name; null: not compared"
    )


class Allclose(Metric[ComparedArrays]):
    """Rows, K = 2: 1 where every output of a sample is close, then 1."""

    samples = (ComparedArrays,)

    def example_rows(self, samples: ComparedArrays, settings: Mapping[str, Any]) -> ExampleRows:
        """Return whether each value v of a sample is within atol + rtol |w| of the original's w.

        As numpy.allclose with `equal_nan`; integers, booleans and texts must be equal.
        """
        tolerances = AllcloseSettings.model_validate(settings)
        limits = {name: _limits(tolerances, name) for name in samples.expected[0]}
        compared = {name: limit for name, limit in limits.items() if limit is not None}
        pairs = zip(samples.outputs, samples.expected, strict=True)
        rows: Rows = [
            [int(all(_is_close(got[name], expected[name], limit) for name, limit in compared.items())), 1]
            for got, expected in pairs
        ]
        definition = f"{tolerances.model_dump_json()}|reference:{samples.key[:12]}|ci:wilson"
        return ExampleRows(rows, f"outputs:{','.join(samples.expected[0])}|{definition}")

    def check_graph(self, settings: Mapping[str, Any], outputs: OutputShapes) -> None:
        """Check that the outputs with a tolerance exist."""
        require_graph_outputs(self.name, "outputs", settings.get("outputs", {}), outputs)


def _limits(tolerances: AllcloseSettings, output: str) -> Tolerance | None:
    """Return the tolerance of an output, with the common values where it has none; None: not compared."""
    if output not in tolerances.outputs:
        return tolerances
    own_limits = tolerances.outputs[output]
    if own_limits is None:
        return None
    common = {"rtol": tolerances.rtol, "atol": tolerances.atol}
    return Tolerance(**common | own_limits.model_dump(exclude_unset=True))


def _is_close(got: NDArray[Any], expected: NDArray[Any], limits: Tolerance) -> bool:
    if got.shape != expected.shape:
        return False
    if expected.dtype.kind != "f" or got.dtype.kind != "f":
        return bool(np.array_equal(got, expected))
    a, b = got.astype(np.float64), expected.astype(np.float64)
    return bool(np.allclose(a, b, rtol=limits.rtol, atol=limits.atol, equal_nan=True))


ALLCLOSE = Allclose(
    name="allclose",
    title="Within tolerance",
    unit="%",
    description="samples whose every value is within atol + rtol times the original graph's value",
    optional=("custom",),
    kind="proportion",
    settings=AllcloseSettings,
    compares_with_baseline=True,
)
