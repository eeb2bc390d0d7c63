"""The importances of `prune`: a line each, and a file of the same name with the functions (no torch here)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal


@dataclass(frozen=True)
class Importance:
    """How units are scored; the functions are in the file `compress/prune/importances/NAME.py`.

    A function per target, which raises InputError if it needs samples that do not exist:

    - heads, ffn: `score_units(ScoredModel, (attentions, blocks)) -> UnitScores`
    - width: `score_width(ScoredModel, D) -> float64 [D]`, by channel of the hidden states
    - channels: `score_channels(ScoredModel, groups) -> UnitScores`, of which only `neurons` has values
    """

    name: str
    description: str
    """For the documentation of the setting."""
    source: str
    """The papers that define the score, by target."""
    targets: tuple[str, ...]
    """Units that it scores."""
    needs: Literal["weights", "samples", "labels"]
    """What scores are computed from: weights alone, calibration samples, or samples with labels."""
    compares_kinds: bool = True
    """Whether the score of a head can be compared with that of a neuron; a budget needs it."""
    is_local: bool = False
    """Whether the weights of one block suffice, so that a large model is pruned block by block."""
    is_per_cost: bool = False
    """Whether a budget multiplies the scores by the cost of a unit: they do not estimate a loss."""

    def scorer(self, target: str) -> Callable[[Any, Any], Any]:
        """Import the file of the importance; return its function for `target`."""
        kind = "units" if target in ("heads", "ffn") else target
        function: Callable[[Any, Any], Any] = getattr(
            import_module(f"smelt.compress.prune.importances.{self.name}"), f"score_{kind}"
        )
        return function


_ALL_TARGETS = ("heads", "ffn", "width", "channels")
IMPORTANCES: Mapping[str, Importance] = {
    importance.name: importance
    for importance in (
        Importance(
            "taylor",
            "gradient times value",
            "heads: Michel et al. 2019, arXiv:1905.10650; neurons: DynaBERT, Hou et al. 2020,"
            " arXiv:2004.04037, run_glue.py; channels: Molchanov et al. 2019, arXiv:1906.10771",
            _ALL_TARGETS,
            "labels",
        ),
        Importance(
            "fisher",
            "squared gradient",
            "Kwon et al. 2022, arXiv:2204.09656",
            _ALL_TARGETS,
            "labels",
        ),
        Importance(
            "magnitude",
            "weight norms",
            "channels: Li et al. 2017, arXiv:1608.08710",
            _ALL_TARGETS,
            "weights",
            compares_kinds=False,
            is_local=True,
        ),
        Importance(
            "wanda",
            "weight times input norm",
            "Sun et al. 2023, arXiv:2306.11695",
            ("heads", "ffn"),
            "samples",
            compares_kinds=False,
        ),
        Importance(
            "obs",
            "loss after a refit of the other units (default with a budget)",
            "ZipLM, Kurtic et al. 2023, arXiv:2302.04089; The LLM Surgeon, van der Ouderaa et al. 2024,"
            " arXiv:2312.17244",
            ("heads", "ffn"),
            "labels",
        ),
        Importance("random", "the baseline", "", _ALL_TARGETS, "weights", is_per_cost=True),
        Importance(
            "activation",
            "hidden states (default for width)",
            "Minitron, Muralidharan et al. 2024, arXiv:2407.14679",
            ("width",),
            "samples",
        ),
    )
}
