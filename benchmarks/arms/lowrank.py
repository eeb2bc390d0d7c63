"""Low rank without training: in what a pair is nearest, and how one budget is shared out."""

_FRACTIONS = (0.8, 0.6)
_METHODS = ("svd", "asvd", "fwsvd", "whitened-svd")

ARMS = {
    "whole model": [],
    **{
        f"{method}, {fraction:g} of each layer's weights": [
            ("factorize", {"method": method, "ratio": fraction, "aim": "size"})
        ]
        for fraction in _FRACTIONS
        for method in _METHODS
    },
    **{
        f"{method}, {fraction:g} of all weights, by {by}": [
            ("factorize", {"method": method, "budget": {"parameters": fraction, "by": by}, "aim": "size"})
        ]
        for fraction in _FRACTIONS
        for method in ("svd", "whitened-svd")
        for by in ("error", "damage")
    },
}
