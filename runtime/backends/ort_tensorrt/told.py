"""What a provider is told, `provider.json` beside the graphs: written by the export, read at opening.

Whoever opens a graph without smelt finds there the options that ONNX Runtime's provider takes, as it takes
them. Where its caches lie depends on the machine and is not in the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.files import load_json
from smelt.runtime.backends.onnx_session import MAKE_AGAIN

FILE = "provider.json"
_SCHEMA = 1
# What the export writes. The providers have others that load a library, write files anywhere or take an
# address in memory; a file that came with somebody else's graph does not get to say them.
OPTIONS = frozenset(
    {
        *("trt_fp16_enable", "trt_bf16_enable", "trt_int8_enable", "trt_layer_norm_fp32_fallback"),
        *("trt_max_workspace_size", "trt_builder_optimization_level", "trt_timing_cache_enable"),
        *("trt_engine_hw_compatible", "trt_context_memory_sharing_enable", "nv_max_workspace_size"),
        *(f"{prefix}_profile_{end}_shapes" for prefix in ("trt", "nv") for end in ("min", "opt", "max")),
    }
)
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Told:
    """Of one graph. sha256: of it and its weights. options: of the provider, by ONNX Runtime's names."""

    sha256: str
    options: Mapping[str, str]

    @property
    def most(self) -> dict[str, Shape]:
        """Return the largest shape of each input that has one."""
        name = next((n for n in self.options if n.endswith("_profile_max_shapes")), None)
        return shapes_from(self.options[name]) if name else {}


def write_told(folder: Path, provider: str, graphs: Mapping[str, Told]) -> None:
    """Write the file into the folder of the graphs."""
    listed = {name: {"sha256": told.sha256, "options": dict(told.options)} for name, told in graphs.items()}
    text = json.dumps({"schema_version": _SCHEMA, "provider": provider, "graphs": listed}, indent=1)
    (folder / FILE).write_text(text + "\n", encoding="utf-8")


def read_told(folder: Path, provider: str) -> dict[str, Told]:
    """Return by graph what the provider is told.

    Raises:
        InputError: there is no such file, it is damaged, it is for another provider, or it says an option
            that is not in OPTIONS.
    """
    path = folder / FILE
    try:
        said: Any = load_json(path)
        if said["schema_version"] != _SCHEMA:
            raise InputError(
                f"{path}: written by another version of smelt. {MAKE_AGAIN}", code="wrong-version"
            )
        found = {
            str(name): Told(str(of["sha256"]), {str(k): str(v) for k, v in of["options"].items()})
            for name, of in said["graphs"].items()
        }
        for told in found.values():
            told.most  # noqa: B018  # shapes that are none are a damaged file too
        made_for = said["provider"]
    except FileNotFoundError as error:
        raise InputError(
            f"{path}: no such file; it says for which sizes TensorRT builds its engines. {MAKE_AGAIN}",
            code="missing-file",
        ) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {error!r}. {MAKE_AGAIN}", code="damaged-file") from error
    if made_for != provider:
        raise InputError(
            f"{path}: made for {made_for}, not for {provider}. {MAKE_AGAIN}", code="wrong-provider"
        )
    strange = sorted({name for told in found.values() for name in told.options} - OPTIONS)
    if strange:
        raise InputError(
            f"{path}: it says {', '.join(strange)[:200]}, which smelt neither writes nor passes on."
            f" {MAKE_AGAIN}",
            code="unknown-setting",
        )
    return found


def shapes_as_text(shapes: Mapping[str, Shape]) -> str:
    """Return shapes as the providers take them: `input_ids:1x8,attention_mask:1x8`."""
    return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())


def shapes_from(text: str) -> dict[str, Shape]:
    """Return the shapes of such a text.

    Raises:
        ValueError: it is none.
    """
    parts = [part.rpartition(":") for part in text.split(",") if part]
    return {name: tuple(int(size) for size in sizes.split("x")) for name, _, sizes in parts}
