"""Half of the weights zero, without structure and 2 of 4, by every method; no training."""

from __future__ import annotations

from typing import Any

ARMS: dict[str, list[tuple[str, dict[str, Any]]]] = {"model": []}
for _what in ({"sparsity": 0.5}, {"pattern": "2:4"}):
    for _method in ("random", "magnitude", "wanda", "sparsegpt"):
        _word = next(iter(_what.values()))
        ARMS[f"{_word}, {_method}"] = [("sparsify", {"method": _method, **_what})]
# The two that look at inputs beside the one that looks at weights alone.
AGAINST = {
    f"{_word}, {_method}": f"{_word}, magnitude"
    for _word in ("0.5", "2:4")
    for _method in ("wanda", "sparsegpt")
}
SEEDS = 3
