"""Units that go before `quantize`, and from what it left: the same fraction stays, the same scheme."""

from __future__ import annotations

from typing import Any

SCHEMES: dict[str, dict[str, Any]] = {
    "int8": {"scheme": "int8-dynamic"},
    "int4": {"scheme": "int4", "embedding_scheme": "int8-dynamic"},
    "int4 by gptq": {"scheme": "int4", "embedding_scheme": "int8-dynamic", "method": "gptq"},
}
CUTS: dict[str, dict[str, Any]] = {
    "neurons, keep 0.5": {"targets": ["ffn"], "keep_ratio": 0.5},
    "neurons, keep 0.5, not compensated": {"targets": ["ffn"], "keep_ratio": 0.5, "reconstruct": False},
    "heads, keep 0.75": {"targets": ["heads"], "keep_ratio": 0.75},
}
ARMS: dict[str, list[tuple[str, dict[str, Any]]]] = {"model": []}
AGAINST: dict[str, str] = {}
for _name, _scheme in SCHEMES.items():
    ARMS[_name] = [("quantize", _scheme)]
    for _what, _cut in CUTS.items():
        _first, _then = f"{_name}; {_what}: prune, quantize", f"{_name}; {_what}: quantize, prune"
        ARMS[_first] = [("prune", _cut), ("quantize", _scheme)]
        ARMS[_then] = [("quantize", _scheme), ("prune", _cut)]
        AGAINST[_then] = _first
SEEDS = 2
AS_RUN = True
TEXTS = {name: (1,) for name in ARMS if "neurons, keep 0.5:" in name or name in ("model", *SCHEMES)}
