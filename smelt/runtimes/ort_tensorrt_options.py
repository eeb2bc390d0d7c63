"""Options of ONNX Runtime's TensorRT provider, in `provider.json`, and the folders of its cached engines.

The export writes `provider.json` next to the graphs; it is read when they are opened. A program that opens a
graph without smelt finds there the provider's options, in its format. The folder of its caches depends on the
machine and is not in the file.

Engines are cached in one folder of the user's cache per graph, machine and versions. ONNX Runtime names a
cached engine after the graph's nodes, not after its weights, and uses it without a check ("clean up any old
engine ... if any of the following changes", its documentation says). So everything that an engine depends on
is in the folder's name, and readable in `made_for.json`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.files import json_hash, load_json, write_atomically
from smelt.runtimes.onnx_session import REEXPORT_HINT
from smelt.runtimes.ort_tensorrt_provider import PROVIDER

ENGINE_KEY_FILE = "made_for.json"
_DIGITS = 16


def engine_cache_root() -> Path:
    """Return the folder of all these caches; it may be removed while no model is running."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "smelt" / "ort-tensorrt"


def engine_cache_folder(key: Mapping[str, Any]) -> Path | None:
    """Return the folder of engines for exactly this key, empty if there were none.

    A folder whose `made_for.json` differs, or cannot be read, is emptied. None: the cache cannot be written,
    so that engines are built each time.

    Args:
        key: JSON-able: graph, options, versions, GPU.
    """
    folder = engine_cache_root() / json_hash(key)[:_DIGITS]
    note = folder / ENGINE_KEY_FILE
    try:
        if folder.exists() and _read_key(note) != key:
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if not note.exists():
            write_atomically(note, json.dumps(key, indent=1, sort_keys=True) + "\n")
        if not os.access(folder, os.W_OK):
            return None
    except OSError:
        return None
    return folder


def _read_key(note: Path) -> Any:
    try:
        return load_json(note)
    except (OSError, ValueError):
        return None


PROVIDER_OPTIONS_FILE = "provider.json"
_SCHEMA = 1
# The options that the export writes. The provider has others that load a library, write files anywhere or
# take a memory address; a file that came with a third-party graph must not set them.
ALLOWED_OPTIONS = frozenset(
    {
        *("trt_fp16_enable", "trt_bf16_enable", "trt_int8_enable", "trt_layer_norm_fp32_fallback"),
        *("trt_max_workspace_size", "trt_builder_optimization_level", "trt_timing_cache_enable"),
        *("trt_engine_hw_compatible", "trt_context_memory_sharing_enable"),
        *(f"trt_profile_{end}_shapes" for end in ("min", "opt", "max")),
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
        return parse_shapes(self.options.get("trt_profile_max_shapes", ""))


def write_provider_options(folder: Path, graphs: Mapping[str, ProviderOptions]) -> None:
    """Write the options file into the folder of the graphs."""
    listed = {
        name: {"sha256": options.sha256, "options": dict(options.options)} for name, options in graphs.items()
    }
    text = json.dumps({"schema_version": _SCHEMA, "provider": PROVIDER, "graphs": listed}, indent=1)
    (folder / PROVIDER_OPTIONS_FILE).write_text(text + "\n", encoding="utf-8")


def read_provider_options(folder: Path) -> dict[str, ProviderOptions]:
    """Return the provider options by graph.

    Raises:
        InputError: the file is missing or damaged, is for another provider, or has an option that is not in
            OPTIONS.
    """
    path = folder / PROVIDER_OPTIONS_FILE
    try:
        content: Any = load_json(path)
        if content["schema_version"] != _SCHEMA:
            raise InputError(
                f"{path}: this file was written by another version of smelt. {REEXPORT_HINT}",
                code="wrong-version",
            )
        found = {
            str(name): ProviderOptions(str(of["sha256"]), {str(k): str(v) for k, v in of["options"].items()})
            for name, of in content["graphs"].items()
        }
        for options in found.values():
            options.max_shapes  # noqa: B018  # invalid shapes are a damaged file too
        made_for = content["provider"]
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
    if made_for != PROVIDER:
        raise InputError(
            f"{path}: this file was written for {made_for}, not for {PROVIDER}. {REEXPORT_HINT}",
            code="wrong-provider",
        )
    strange = sorted({name for options in found.values() for name in options.options} - ALLOWED_OPTIONS)
    if strange:
        raise InputError(
            f"{path}: unknown options {', '.join(strange)[:200]}. {REEXPORT_HINT}",
            code="unknown-setting",
        )
    return found


def format_shapes(shapes: Mapping[str, TensorShape]) -> str:
    """Return shapes in the provider's format: `input_ids:1x8,attention_mask:1x8`."""
    return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())


def parse_shapes(text: str) -> dict[str, TensorShape]:
    """Return the shapes of a text in this format.

    Raises:
        ValueError: the text has another format.
    """
    parts = [part.rpartition(":") for part in text.split(",") if part]
    return {name: tuple(int(size) for size in sizes.split("x")) for name, _, sizes in parts}
