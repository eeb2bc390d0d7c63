"""ONNX Runtime backend with its TensorRT provider: sessions, size limits and options of engines.

The export writes `provider.json` next to the graphs; it is read when they are opened. A program that opens a
graph without smelt finds there the provider's options, in its format. Engines are built for the sizes in it;
more rows than they take are run in parts, in sequence. ONNX Runtime continues without a provider that does
not load, and prints a message; here that is an error.

The folder of cached engines depends on the machine and is not in the file: one folder of the user's cache per
graph, machine and versions. ONNX Runtime names a cached engine after the graph's nodes, not after its
weights, and uses it without a check ("clean up any old engine ... if any of the following changes", its
documentation says). So everything that an engine depends on is in the folder's name, and readable in
`made_for.json`.

Shapes: R = rows, S = input tokens of one call, V = vocabulary.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from smelt.core.errors import InputError, MissingDependencyError, RunError
from smelt.core.files import json_hash, load_json, write_atomically
from smelt.generation.backend import (
    Feeds,
    GraphInterface,
    Logits,
    ModelGraphs,
    NoGenerationGraphs,
    Tokens,
    TopLogits,
)
from smelt.runtimes.device import gpu_index, list_cuda_gpus
from smelt.runtimes.onnx_backend import OnnxBackend
from smelt.runtimes.onnx_backend import OnnxDecodeState as HeldPart
from smelt.runtimes.onnx_session import FLOAT_ACTIVATIONS_OPTION, REEXPORT_HINT, cuda_provider_config
from smelt.runtimes.ort_tensorrt_provider import (
    PROVIDER,
    find_tensorrt_libraries,
    linked_versions,
    onnxruntime_version,
    provider_device,
    provider_library,
    tensorrt_packages,
)
from smelt.runtimes.tensorrt_engine import graph_hash

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
    key_path = folder / ENGINE_KEY_FILE
    try:
        if folder.exists() and _read_key(key_path) != key:
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if not key_path.exists():
            write_atomically(key_path, json.dumps(key, indent=1, sort_keys=True) + "\n")
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
        *("trt_engine_hw_compatible", "trt_context_memory_sharing_enable", "trt_sparsity_enable"),
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
    graph_options = {
        name: {"sha256": options.sha256, "options": dict(options.options)} for name, options in graphs.items()
    }
    text = json.dumps({"schema_version": _SCHEMA, "provider": PROVIDER, "graphs": graph_options}, indent=1)
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
        options_by_graph = {
            str(name): ProviderOptions(
                str(graph_entry["sha256"]), {str(k): str(v) for k, v in graph_entry["options"].items()}
            )
            for name, graph_entry in content["graphs"].items()
        }
        for options in options_by_graph.values():
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
    unknown_names = sorted(
        {name for options in options_by_graph.values() for name in options.options} - ALLOWED_OPTIONS
    )
    if unknown_names:
        raise InputError(
            f"{path}: unknown options {', '.join(unknown_names)[:200]}. {REEXPORT_HINT}",
            code="unknown-setting",
        )
    return options_by_graph


def format_shapes(shapes: Mapping[str, TensorShape]) -> str:
    """Return shapes in the provider's format: `input_ids:1x8,attention_mask:1x8`."""
    return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())


def parse_shapes(text: str) -> dict[str, TensorShape]:
    """Return the shapes of a text in this format.

    Raises:
        ValueError: the text has another format.
    """
    parts = [entry.rpartition(":") for entry in text.split(",") if entry]
    return {name: tuple(int(size) for size in sizes.split("x")) for name, _, sizes in parts}


_LOCK = threading.Lock()  # protects what is done once per process


def open_provider_session(path: Path, provider_options: ProviderOptions, threads: int | None = None) -> Any:
    """Open the graph `path` with the provider; engines are built the first time, which may take minutes.

    Raises:
        InputError: it is not the graph of `provider_options`, or the provider cannot build it.
        MissingDependencyError: the provider does not load.
    """
    file_hash = graph_hash(path)
    if file_hash != provider_options.sha256:
        raise InputError(
            f"{path}: provider.json was written for another graph. {REEXPORT_HINT}", code="changed-file"
        )
    if PROVIDER not in onnxruntime.get_available_providers():
        raise MissingDependencyError(
            f"{path}: this ONNX Runtime ({onnxruntime.__version__}) has no {PROVIDER}: pip install"
            " 'onnxruntime-gpu[cuda,cudnn]', without the package onnxruntime.",
            code="not-installed",
        )
    folder = engine_cache_folder(engine_key(file_hash, provider_options.options))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry(*FLOAT_ACTIVATIONS_OPTION)  # for the nodes that TensorRT does not take
    if threads is not None:
        options.intra_op_num_threads = threads
    _load_libraries()
    trt_options = with_cache_options(provider_options.options, folder, path.stem)
    providers: list[Any] = [
        (PROVIDER, trt_options | {"device_id": str(gpu_index())}), cuda_provider_config(),
        "CPUExecutionProvider",
    ]  # fmt: skip
    return _create_session(path, options, providers)


def engine_key(graph: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Return everything that an engine depends on, JSON-able."""
    return {
        "provider": PROVIDER,
        "graph_sha256": graph,
        "options": dict(options),
        "onnxruntime": onnxruntime_version(),
        "tensorrt": tensorrt_packages(),
        # a library on the loader's path may be of another version than the package that is installed
        "library": "".join(str(path.resolve()) for path in _cuda_libraries()[:1]),
        "gpus": [list(gpu) for gpu in list_cuda_gpus()],
    }


def with_cache_options(options: Mapping[str, str], folder: Path | None, graph: str) -> dict[str, str]:
    """Return the options of TensorRT's provider with those of this machine: engines and timings are cached.

    Args:
        options: of `provider.json`.
        folder: of the engines, None where nothing can be cached.
        graph: its name, the prefix of its engines' names.
    """
    if folder is None:
        return dict(options)
    cache_options = dict(options) | {
        "trt_engine_cache_enable": "True",
        "trt_engine_cache_path": str(folder),
        "trt_engine_cache_prefix": graph,
    }
    if options.get("trt_timing_cache_enable") == "True":
        cache_options["trt_timing_cache_path"] = str(
            engine_cache_root()
        )  # of kernels, so that all graphs share them
    return cache_options


def _load_libraries() -> None:
    """Load CUDA, cuDNN and TensorRT from their packages, which the loader does not search."""
    with _LOCK:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints missing libraries
            onnxruntime.preload_dlls()
        for library in _cuda_libraries():
            try:
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                raise MissingDependencyError(
                    f"{library}: cannot be loaded: {error}", code="broken-installation"
                ) from error


def _cuda_libraries() -> list[Path]:
    library = provider_library()
    linked_libraries = linked_versions(library) if library is not None else None
    return (find_tensorrt_libraries(linked_libraries.tensorrt) or []) if linked_libraries is not None else []


def _create_session(path: Path, session_options: Any, providers: list[Any]) -> Any:
    try:
        session = onnxruntime.InferenceSession(
            str(path), session_options, providers=providers, enable_fallback=0
        )
    except Exception as error:  # its error classes share no base but Exception
        if "Please install TensorRT libraries" in str(error):
            raise MissingDependencyError(
                f"{path}: {PROVIDER} cannot be loaded: {error}", code="broken-installation"
            ) from error
        raise InputError(
            f"{path}: TensorRT in ONNX Runtime cannot load this graph: {error} {REEXPORT_HINT}",
            code="unopened-graph",
        ) from error
    if PROVIDER not in session.get_providers():  # it warns, and continues without the provider
        raise MissingDependencyError(
            f"{path}: ONNX Runtime loaded this graph without {PROVIDER}, because its libraries"
            " cannot be loaded. `smelt doctor` shows what is missing.",
            code="broken-installation",
        )
    return session


_ROWS, _LENGTH = 0, 1  # axes of input_ids [R, S]; of any other input the first are rows too
_PLACES = 2  # the axis of positions in a cache [R, H, P, d]
_PAST = "past_key_values."


@dataclass
class SplitDecodeState:
    """The parts of a batch, in the order of their rows."""

    parts: list[HeldPart]


class OrtTensorrtBackend(NoGenerationGraphs):
    """A `Backend`; on a machine without the provider its graphs run on ONNX Runtime's CPU provider."""

    name = "onnxruntime"
    prefers_stepwise = False

    def __init__(
        self,
        folder: Path,
        graphs: ModelGraphs,
        target: str | None,
        threads: int | None,
        device: str,
        dtype: str | None = None,
    ) -> None:
        self.version: str = onnxruntime.__version__
        self.device = provider_device(device, target)
        self.max_tokens_per_call: int | None = None
        self.max_total_tokens: int | None = None
        self._most_rows: int | None = None
        self._most_decoder_rows: int | None = None
        opener = None
        if self.device == "cuda":
            self.name = "onnxruntime-tensorrt"
            opener = self._session_opener(folder, graphs)
        device_type = "cpu" if opener is None else device
        self._inner = OnnxBackend(folder, graphs, "tensorrt", threads, device_type, dtype, opener)

    def _session_opener(self, folder: Path, graphs: ModelGraphs) -> Callable[[Path, int | None], Any]:
        """Read the sizes that engines are built for; return the function that opens a graph."""
        options = read_provider_options(folder)
        first, main = (
            _options_for_graph(options, graph, folder).max_shapes
            for graph in (graphs.call_order[0], graphs.main)
        )
        has_tokens = "input_ids" in first  # an image is not split
        sizes = first["input_ids"] if has_tokens else next(iter(first.values()), ())
        if len(sizes) <= _LENGTH:
            raise InputError(
                f"{folder / PROVIDER_OPTIONS_FILE}: no sizes for the inputs of the first graph."
                f" {REEXPORT_HINT}",
                code="missing-engine-sizes",
            )
        self._most_rows, self.max_tokens_per_call = sizes[_ROWS], sizes[_LENGTH] if has_tokens else None
        self._most_decoder_rows = main["input_ids"][_ROWS] if graphs.uses_cache else self._most_rows
        # a cache that only the previous graph fills is as long as the source text, not as the output
        growing_caches = [name for name in main if name.startswith(_PAST) and ".encoder." not in name]
        if graphs.uses_cache and growing_caches:
            self.max_total_tokens = (
                main[growing_caches[0]][_PLACES] + 1
            )  # the last token of a text is never an input
        return lambda path, threads: open_provider_session(path, options[path.stem], threads)

    def _split_decoder_rows(self, rows: int) -> list[slice]:
        return _split_rows(rows, self._most_decoder_rows or max(1, rows))

    def call(self, graph: str, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """Run a graph once; return all of its outputs by name."""
        count = len(next(iter(feeds.values())))  # axis 0 of all inputs is the row
        parts = [
            self._inner.call(graph, _select_rows(feeds, row_slice))
            for row_slice in _split_rows(count, self._most_rows or max(1, count))
        ]
        return {name: np.concatenate([outputs[name] for outputs in parts]) for name in parts[0]}

    def start(self, rows: int, feeds: Feeds | None = None, shared: Feeds | None = None) -> SplitDecodeState:
        """Run the graph before `main`, if there is one; start with empty caches."""
        parts = [
            self._inner.start(
                row_slice.stop - row_slice.start,
                _select_rows(feeds or {}, row_slice),
                _select_rows(shared or {}, row_slice),
            )
            for row_slice in _split_rows(rows, self._most_rows or max(1, rows))
        ]
        slices = self._split_decoder_rows(rows)
        if len(slices) < len(parts):  # a decoder takes more rows, as many as there are beams
            all_rows = np.arange(rows)
            parts = [self._inner.select_rows(parts, all_rows[row_slice], None) for row_slice in slices]
        return SplitDecodeState(parts)

    def step(self, held: SplitDecodeState, feeds: Feeds, last: int = 1) -> Logits:
        """Run int64 [R, S]; return logits, [R, V] or [R, S or last, V].

        Raises:
            RunError: longer than the engines' size limit.
        """
        part_logits = [
            self._inner.step(state_part, part_feeds, last)
            for state_part, part_feeds in self._split_step(held, feeds)
        ]
        return part_logits[0] if len(part_logits) == 1 else np.concatenate(part_logits)

    def step_top(self, held: SplitDecodeState, feeds: Feeds, count: int) -> TopLogits:
        """Run int64 [R, S]; return the `count` highest logits of the last token, chosen on the GPU.

        Raises:
            RunError: longer than the engines' size limit.
        """
        parts = [
            self._inner.step_top(state_part, part_feeds, count)
            for state_part, part_feeds in self._split_step(held, feeds)
        ]
        return TopLogits(
            np.concatenate([part.values for part in parts]),
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.log_probs for part in parts]),
        )

    @property
    def reduces_logits(self) -> bool:
        """Return whether the logits are on a GPU."""
        return self._inner.reduces_logits

    def _split_step(
        self, held: SplitDecodeState, feeds: Feeds
    ) -> list[tuple[HeldPart, dict[str, NDArray[Any]]]]:
        """Return the parts of a batch with their inputs."""
        tokens = held.parts[0].caches[0].shape()[_PLACES] + feeds["input_ids"].shape[1]
        if self.max_total_tokens is not None and tokens > self.max_total_tokens:
            raise RunError(
                f"a text has {tokens} tokens, but the engines accept at most {self.max_total_tokens}."
                f" Export again with onnx: {{engine: {{max_new_tokens: ..., lengths: ...}}}}.",
                code="engine-limit",
            )
        slices = self._split_decoder_rows(len(feeds["input_ids"]))
        return [
            (state_part, _select_rows(feeds, row_slice))
            for state_part, row_slice in zip(held.parts, slices, strict=True)
        ]

    def reorder_cache(self, held: SplitDecodeState, rows: Tokens, shared: bool) -> None:
        """Replace row i by row rows[i], in parts of at most the engine's number of rows."""
        slices = self._split_decoder_rows(len(rows))
        if len(held.parts) == len(slices) == 1:
            self._inner.reorder_cache(held.parts[0], rows, shared)
            return
        old = held.parts
        held.parts = [
            self._inner.select_rows(old, rows[row_slice], None if shared else old[i].shared)
            for i, row_slice in enumerate(slices)
        ]

    def close(self) -> None:
        """Free the sessions and their engines."""
        self._inner.close()


def _split_rows(rows: int, most: int) -> list[slice]:
    return [slice(start, min(rows, start + most)) for start in range(0, rows, most)]


def _select_rows(feeds: Feeds, rows: slice) -> dict[str, NDArray[Any]]:
    return {name: values[rows] for name, values in feeds.items()}


def _options_for_graph(
    options_by_graph: dict[str, ProviderOptions], graph: GraphInterface, folder: Path
) -> ProviderOptions:
    if graph.name not in options_by_graph:
        raise InputError(
            f"{folder / PROVIDER_OPTIONS_FILE}: no entry for {graph.name}.onnx. {REEXPORT_HINT}",
            code="missing-engine-sizes",
        )
    return options_by_graph[graph.name]
