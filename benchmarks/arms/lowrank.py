"""Low rank without training: in what a pair is nearest, and how one budget is shared out."""

_FRACTIONS = (0.8, 0.6)
_METHODS = ("svd", "asvd", "fwsvd", "whitened-svd")

ARMS = {
    "whole model": [],
    **{
        f"{method}, {fraction:g} of each layer's weights": [
            ("factorize", {"method": method, "keep_ratio": fraction, "optimize_for": "size"})
        ]
        for fraction in _FRACTIONS
        for method in _METHODS
    },
    **{
        f"{method}, {fraction:g} of all weights, by {by}": [
            (
                "factorize",
                {"method": method, "parameter_budget": fraction, "objective": by, "optimize_for": "size"},
            )
        ]
        for fraction in _FRACTIONS
        for method in ("svd", "whitened-svd")
        for by in ("error", "sensitivity")
    },
}
# Of each fraction what looks at inputs, or weighs layers, beside the plain decomposition of each layer.
AGAINST = {
    name: f"svd, {fraction:g} of each layer's weights"
    for fraction in _FRACTIONS
    for name in ARMS
    if f", {fraction:g} of" in name
    and not name.startswith("svd, 0.8 of each")
    and not name.startswith("svd, 0.6 of each")
}
SEEDS = 3
