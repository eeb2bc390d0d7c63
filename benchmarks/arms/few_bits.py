"""How codes of few bits are chosen: rtn, ends cut off, GPTQ, both; not trained, vocabulary int8."""

from __future__ import annotations

from typing import Any

ARMS: dict[str, list[tuple[str, dict[str, Any]]]] = {}
for _scheme, _more in (
    ("int4", {}),
    ("int3", {}),
    ("int2", {}),
    ("int2", {"symmetric": False}),
    ("ternary", {}),
):
    for _method, _clip in (("rtn", "none"), ("rtn", "mse"), ("gptq", "none"), ("gptq", "mse")):
        _name = f"{_scheme}{''.join(f', {k} {v}' for k, v in _more.items())}, {_method}"
        _settings = {
            "scheme": _scheme,
            "method": _method,
            "clip": _clip,
            "embedding_scheme": "int8-dynamic",
            **_more,
        }
        ARMS[f"{_name}{', ends cut off' if _clip == 'mse' else ''}"] = [("quantize", _settings)]
