"""The sparsity methods: a line each, and a file of the same name with the function (no torch here)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from smelt.compress.sparsify.pattern import SparsityInput, SparsityPattern


@dataclass(frozen=True)
class SparsityMethod:
    """How the weights to set to zero are chosen; the function is in `compress/sparsify/methods/NAME.py`.

    description: for the documentation of the setting. zeros, kept: which weights it sets to zero, and what
    happens to the others, for the page. source: the paper, empty for a control.
    needs: statistics of a layer's inputs: none, their norms, or second moments.
    """

    name: str
    description: str
    zeros: str
    source: str = ""
    kept: str = "unchanged"
    needs: Literal["nothing", "norms", "moments"] = "nothing"

    def load(self) -> Callable[[SparsityInput, SparsityPattern, Generator], Tensor]:
        """Import the file of the method; return its function `sparsify_layer`.

        From the weight and statistics of a layer, the pattern, and a generator of random numbers it returns
        the new weight, float32 [N, K].
        """
        module = import_module(f"smelt.compress.sparsify.methods.{self.name}")
        function: Callable[[SparsityInput, SparsityPattern, Generator], Tensor] = module.sparsify_layer
        return function


SPARSITY_METHODS: Mapping[str, SparsityMethod] = {
    method.name: method
    for method in (
        SparsityMethod(
            "wanda",
            "by weight times input norm",
            "the smallest |W| · ‖input‖ per output row",
            "Sun et al. 2024, arXiv:2306.11695",
            needs="norms",
        ),
        SparsityMethod(
            "ria",
            "by weight relative to its row and column, times input norm",
            "the smallest (|W| / row sum + |W| / column sum) · √‖input‖ of a layer",
            "Zhang et al. 2024, Plug-and-Play, ICLR",
            needs="norms",
        ),
        SparsityMethod(
            "sparsegpt",
            "also compensates the error",
            "the smallest w² / U², U the Cholesky factor of the inverse second moment of the inputs, in"
            " blocks of 128 columns, 1 % damping",
            "Frantar & Alistarh 2023, arXiv:2301.00774",
            kept="compensate the error",
            needs="moments",
        ),
        SparsityMethod(
            "magnitude", "by weight", "the smallest of a layer", "Han et al. 2015, arXiv:1506.02626"
        ),
        SparsityMethod("random", "the control", "random ones of a layer"),
    )
}


@dataclass(frozen=True)
class GradualMethod:
    """How masks are computed during training; `compress/sparsify/gradual.py` has the formulas.

    description, zeros, source: as of `SparsityMethod`. trains_scores: whether weights have trained scores.
    uses_threshold: whether a threshold of the scores and a penalty decide the zeros, not a fraction.
    """

    name: str
    description: str
    zeros: str
    source: str
    trains_scores: bool = True
    uses_threshold: bool = False


_SANH = "Sanh et al. 2020, arXiv:2005.07683"
GRADUAL_METHODS: Mapping[str, GradualMethod] = {
    method.name: method
    for method in (
        GradualMethod(
            "movement",
            "removes weights that move to zero",
            "the lowest trained scores, dL/dS = dL/dW' · W; for fine-tuning a pretrained model with few"
            " remaining weights",
            _SANH,
        ),
        GradualMethod(
            "soft-movement",
            "weights with a low score",
            "scores start at 0, sigmoid 0.5. Threshold, penalty and learning rate determine the sparsity,"
            " which the step reports; half a percent of each matrix is kept",
            _SANH,
            uses_threshold=True,
        ),
        GradualMethod(
            "magnitude",
            "the smallest weights",
            "the smallest; better at 50 % (Sanh et al. 2020, figure 2)",
            "Zhu & Gupta 2017, arXiv:1710.01878",
            trains_scores=False,
        ),
    )
}
