"""How int4 codes are chosen, by size of group; without training, head and embeddings int8."""

from __future__ import annotations

from typing import Any

METHODS: dict[str, dict[str, Any]] = {
    "rtn": {},
    "rtn, 99.9 % of each range": {"clip": "percentile", "calibration_percentile": 99.9},
    "gptq": {"method": "gptq"},
    "awq": {"method": "awq"},
    "awq, `clip: awq`": {"method": "awq", "clip": "awq"},
    "hqq": {"method": "hqq"},
    "rtn, zero points": {"symmetric": False},
    "awq, zero points": {"method": "awq", "symmetric": False},
    "hqq, zero points": {"method": "hqq", "symmetric": False},
}
ARMS: dict[str, list[tuple[str, dict[str, Any]]]] = {"model": []}
for _size in (128, 64, 32):
    for _name, _more in METHODS.items():
        _settings = {"scheme": "int4", "group_size": _size, "embedding_scheme": "int8-dynamic", **_more}
        ARMS[f"groups of {_size}, {_name}"] = [("quantize", _settings)]
