"""Mixed precision against one width for all, at equal bytes; not trained, embedding and head included."""

from __future__ import annotations

from typing import Any

ARMS: dict[str, list[tuple[str, dict[str, Any]]]] = {}
AGAINST: dict[str, str] = {}
for _method in ("rtn", "gptq"):
    for _scheme, _budget in (("int4", 4.5), ("int3", 3.5)):
        _uniform = {"scheme": _scheme, "group_size": 32, "method": _method, "embedding_scheme": _scheme}
        ARMS[f"{_scheme}, groups of 32, {_method}"] = [("quantize", _uniform)]
        _mixed = {"mixed_precision": {"target_bits": _budget}, "method": _method}
        ARMS[f"mixed, at most {_budget} bits, {_method}"] = [("quantize", _mixed)]
        AGAINST[f"mixed, at most {_budget} bits, {_method}"] = f"{_scheme}, groups of 32, {_method}"
