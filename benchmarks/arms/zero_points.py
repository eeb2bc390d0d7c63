"""AWQ as its published code runs it, with zero points and clipping, beside nearest with and without them.

Not trained, vocabulary int8.
"""

from __future__ import annotations

from typing import Any

METHODS: dict[str, dict[str, Any]] = {
    "nearest": {},
    "nearest, zero points": {"symmetric": False},
    "awq, clip, zero points": {"method": "awq", "clip": "awq", "symmetric": False},
}
ARMS: dict[str, list[tuple[str, dict[str, Any]]]] = {}
AGAINST: dict[str, str] = {}
for _scheme in ("int4", "int3", "int2"):
    for _name, _more in METHODS.items():
        _settings = {"scheme": _scheme, "group_size": 64, "vocabulary": "int8-dynamic", **_more}
        ARMS[f"{_scheme}, {_name}"] = [("quantize", _settings)]
        if _name != "nearest, zero points":
            AGAINST[f"{_scheme}, {_name}"] = f"{_scheme}, nearest, zero points"
