"""AWQ as its published code runs it, with zero points and clipping, beside rtn with and without them.

Not trained, vocabulary int8.
"""

from __future__ import annotations

from typing import Any

METHODS: dict[str, dict[str, Any]] = {
    "rtn": {},
    "rtn, zero points": {"symmetric": False},
    "awq, clip, zero points": {"method": "awq", "clip": "awq", "symmetric": False},
}
ARMS: dict[str, list[tuple[str, dict[str, Any]]]] = {}
AGAINST: dict[str, str] = {}
for _scheme in ("int4", "int3", "int2"):
    for _name, _more in METHODS.items():
        _settings = {"scheme": _scheme, "group_size": 64, "embedding_scheme": "int8-dynamic", **_more}
        ARMS[f"{_scheme}, {_name}"] = [("quantize", _settings)]
        if _name != "rtn, zero points":
            AGAINST[f"{_scheme}, {_name}"] = f"{_scheme}, rtn, zero points"
