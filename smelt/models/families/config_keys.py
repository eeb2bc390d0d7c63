"""Keys of Hugging Face configs, also nested ones: `text_config.hidden_size` is a key of `text_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def config_value(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a config key, None if it is missing; `text_config.hidden_size` is a nested one."""
    *outer, name = key.split(".")
    for part in outer:
        config = config.get(part) or {}
    return config.get(name)


def set_config_value(config: Any, key: str, value: Any) -> None:
    """Set a key, as of `config_value`, in a config of transformers or in a dict."""
    *outer, name = key.split(".")
    for part in outer:
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    if isinstance(config, dict):
        config[name] = value
    else:
        setattr(config, name, value)
