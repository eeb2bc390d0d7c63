"""Provider options in `provider.json` next to the graphs: written by the export, read at opening.

A program that opens a graph without smelt finds there the options of ONNX Runtime's provider, in its format.
The folder of its caches depends on the machine and is not in the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.files import load_json
from smelt.runtime.backends.onnx_session import REEXPORT_HINT

PROVIDER_OPTIONS_FILE = "provider.json"
_SCHEMA = 1
# The options that the export writes. The providers have others that load a library, write files anywhere or
# take a memory address; a file that came with a third-party graph must not set them.
ALLOWED_OPTIONS = frozenset(
    {
        *("trt_fp16_enable", "trt_bf16_enable", "trt_int8_enable", "trt_layer_norm_fp32_fallback"),
        *("trt_max_workspace_size", "trt_builder_optimization_level", "trt_timing_cache_enable"),
        *("trt_engine_hw_compatible", "trt_context_memory_sharing_enable", "nv_max_workspace_size"),
        *(f"{prefix}_profile_{end}_shapes" for prefix in ("trt", "nv") for end in ("min", "opt", "max")),
    }
)
TensorShape = tuple[int, ...]


@dataclass(frozen=True)
class ProviderOptions:
    """Options of one graph. sha256: of it and its weights. options: of the provider, ONNX Runtime's names."""

    sha256: str
    options: Mapping[str, str]

    @property
    def max_shapes(self) -> dict[str, TensorShape]:
        """Return the largest shape of each input that has one."""
        name = next((n for n in self.options if n.endswith("_profile_max_shapes")), None)
        return parse_shapes(self.options[name]) if name else {}


def write_provider_options(folder: Path, provider: str, graphs: Mapping[str, ProviderOptions]) -> None:
    """Write the options file into the folder of the graphs."""
    listed = {name: {"sha256": told.sha256, "options": dict(told.options)} for name, told in graphs.items()}
    text = json.dumps({"schema_version": _SCHEMA, "provider": provider, "graphs": listed}, indent=1)
    (folder / PROVIDER_OPTIONS_FILE).write_text(text + "\n", encoding="utf-8")


def read_provider_options(folder: Path, provider: str) -> dict[str, ProviderOptions]:
    """Return the provider options by graph.

    Raises:
        InputError: the file is missing or damaged, is for another provider, or has an option that is not in
            OPTIONS.
    """
    path = folder / PROVIDER_OPTIONS_FILE
    try:
        said: Any = load_json(path)
        if said["schema_version"] != _SCHEMA:
            raise InputError(
                f"{path}: this file was written by another version of smelt. {REEXPORT_HINT}",
                code="wrong-version",
            )
        found = {
            str(name): ProviderOptions(str(of["sha256"]), {str(k): str(v) for k, v in of["options"].items()})
            for name, of in said["graphs"].items()
        }
        for told in found.values():
            told.max_shapes  # noqa: B018  # invalid shapes are a damaged file too
        made_for = said["provider"]
    except FileNotFoundError as error:
        raise InputError(
            f"{path}: this file is missing; it contains the sizes for which TensorRT builds its"
            f" engines. {REEXPORT_HINT}",
            code="missing-file",
        ) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path}: cannot be read: {error!r}. {REEXPORT_HINT}", code="damaged-file"
        ) from error
    if made_for != provider:
        raise InputError(
            f"{path}: this file was written for {made_for}, not for {provider}. {REEXPORT_HINT}",
            code="wrong-provider",
        )
    strange = sorted({name for told in found.values() for name in told.options} - ALLOWED_OPTIONS)
    if strange:
        raise InputError(
            f"{path}: unknown options {', '.join(strange)[:200]}. {REEXPORT_HINT}",
            code="unknown-setting",
        )
    return found


def format_shapes(shapes: Mapping[str, TensorShape]) -> str:
    """Return shapes in the providers' format: `input_ids:1x8,attention_mask:1x8`."""
    return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())


def parse_shapes(text: str) -> dict[str, TensorShape]:
    """Return the shapes of a text in this format.

    Raises:
        ValueError: the text has another format.
    """
    parts = [part.rpartition(":") for part in text.split(",") if part]
    return {name: tuple(int(size) for size in sizes.split("x")) for name, _, sizes in parts}
