"""Codes with values of their own beside even steps, at about the same bytes; not trained, vocabulary int8."""

from __future__ import annotations

from typing import Any

SCHEMES: dict[str, dict[str, Any]] = {
    "int4, groups of 32": {"scheme": "int4", "group_size": 32},
    "int4, groups of 64": {"scheme": "int4", "group_size": 64},
    "int4, groups of 128": {"scheme": "int4", "group_size": 128},
    "pow2, groups of 64": {"scheme": "pow2", "group_size": 64},
    "kmeans4, codebooks of 256 inputs": {"scheme": "kmeans4", "group_size": 256},
    "kmeans4, codebooks of 128 inputs": {"scheme": "kmeans4", "group_size": 128},
}
ARMS: dict[str, list[tuple[str, dict[str, Any]]]] = {"model": []}
for _name, _settings in SCHEMES.items():
    for _method in ("rtn", "gptq"):
        _all = {**_settings, "method": _method, "embedding_scheme": "int8-dynamic"}
        ARMS[f"{_name}, {_method}"] = [("quantize", _all)]
