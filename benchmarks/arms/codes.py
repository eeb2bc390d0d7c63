"""How codes are chosen: rtn, ends cut off, GPTQ, and both; without training, head and embeddings int8."""

from __future__ import annotations

from typing import Any

ARMS: dict[str, list[tuple[str, dict[str, Any]]]] = {"model": []}
for _scheme, _more in (
    ("int4", {"group_size": 64}),
    ("int4", {"group_size": 128}),
    ("binary", {"group_size": 64}),
):
    for _method in ("rtn", "gptq"):
        for _clip in ("none", "mse"):
            _name = f"{_scheme}{''.join(f', {k} {v}' for k, v in _more.items())}, {_method}"
            ARMS[f"{_name}{', ends cut off' if _clip == 'mse' else ''}"] = [
                (
                    "quantize",
                    {
                        "scheme": _scheme,
                        "method": _method,
                        "clip": _clip,
                        "embedding_scheme": "int8-dynamic",
                        **_more,
                    },
                )
            ]
