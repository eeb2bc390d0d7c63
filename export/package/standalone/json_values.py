"""Inputs of requests to the service, which are JSON values."""

from __future__ import annotations

import json
from typing import Any


def describe_value(value: Any) -> str:
    """Return a short form of `value`; for lists and objects, which may be large, only type and size."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    is_truncated = isinstance(value, str) and len(value) > 60
    return f"{json.dumps(value[:60])}..." if is_truncated else json.dumps(value)


def read_text(value: Any, expected: str = "a text") -> str:
    """Return `value`, a text; raise ValueError if it is none."""
    if not isinstance(value, str):
        raise ValueError(f"expected {expected}, got {describe_value(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("a text contains a lone surrogate (\\ud800 to \\udfff). Remove it") from None
    return value
