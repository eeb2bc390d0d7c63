"""Import third-party graphs as those of an artifact: one `model.onnx`, or verified generating graphs.

A graph without external weights is copied byte by byte. External weights, under any file names, are collected
in `model.onnx_data`, as in smelt's own graphs.

Optimum's feature extraction returns `last_hidden_state` only. sentence-transformers pooling is added, so that
the graph returns vectors of texts. The added operators have the same form in all opsets. Source:
sentence_transformers/models/Pooling.py and Normalize.py.

Converted generating graphs are compared with Optimum's once, in a separate process with resource limits. For
an encoder-decoder: keys and values of cross-attention, and the logits of the first token, for rows of two
lengths, against Optimum's first graph. For a language model: that a prompt in one call, in two, token by
token and padded on the left gives the same logits.

Shapes: B = batch, L = tokens, D = width.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError
from smelt.core.system import IsolatedProcessError, ProcessLimits, run_isolated
from smelt.generation.backend import Feeds
from smelt.models.text_rules import SentenceRules
from smelt.runtimes.graph_walk import is_external, iter_model_tensors, opset_versions
from smelt.runtimes.onnx_import.convert_optimum import (
    DECODER_WITH_PAST_GRAPH,
    ENCODER_GRAPH,
    ENCODER_HIDDEN_STATES,
    FIRST_DECODER_GRAPH,
    MERGED_DECODER_GRAPH,
    MODEL_GRAPH,
    PAST_PREFIX,
    PRESENT_PREFIX,
    convert_decoder_only,
    convert_encoder_decoder,
    copy_message,
    nodes_for_outputs,
    set_cache_shapes,
)
from smelt.runtimes.onnx_import.graph_files import BITS_BY_TYPE, ExternalLocation, resolve_external_data
from smelt.runtimes.onnx_import.trial_run import trial_limits
from smelt.runtimes.single_call_runners import EMBEDDING_OUTPUT

GRAPH_FILE = f"{MODEL_GRAPH}.onnx"
_BLOCK = 1 << 20
_PAGE = 4096  # a runtime maps the file into memory


def import_graph(source: Path, out: Path, outside: bool) -> Path:
    """Copy the graph in the file `source` into the folder `out`; return the copy.

    outside: whether it has external weights.

    Raises:
        InputError: they no longer exist.
    """
    target = out / GRAPH_FILE
    if not outside:
        shutil.copyfile(source, target)
        return target
    import onnx

    return write_with_external_data(onnx.ModelProto.FromString(source.read_bytes()), source, target)


def write_with_external_data(model: Any, source: Path, target: Path) -> Path:
    """Write an onnx.ModelProto, whose weights may be external to the file `source`, as `target`; return that.

    External weights are collected in the file `NAME.onnx_data` next to it.

    Raises:
        InputError: weights no longer exist.
    """
    try:
        if any(is_external(tensor) for tensor in iter_model_tensors(model)):
            _copy_external_data(model, source, target.with_name(f"{target.name}_data"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{source}: its weights cannot be copied: {error}.", code="unreadable-file"
        ) from error
    target.write_bytes(model.SerializeToString())
    return target


def _copy_external_data(model: Any, source: Path, data: Path) -> None:
    """Copy external data of `model` into the file `data`, each part once, and update `model`."""
    from onnx import TensorProto

    offsets: dict[ExternalLocation, int] = {}
    with data.open("wb") as target:
        for tensor in iter_model_tensors(model):
            if not is_external(tensor):
                continue
            bits = BITS_BY_TYPE[TensorProto.DataType.Name(tensor.data_type)]
            location = resolve_external_data(tensor, source, -(-math.prod(tensor.dims) * bits // 8))
            if location not in offsets:
                target.write(b"\0" * (-target.tell() % _PAGE))
                offsets[location] = target.tell()
                _copy_bytes(location, target)
            del tensor.external_data[:]
            for key, value in (
                ("location", data.name),
                ("offset", offsets[location]),
                ("length", location.length),
            ):
                tensor.external_data.add(key=key, value=str(value))


def _copy_bytes(location: ExternalLocation, target: Any) -> None:
    remaining = location.length
    with location.file.open("rb") as stream:
        stream.seek(location.offset)
        while remaining:
            block = stream.read(min(remaining, _BLOCK))
            if not block:
                raise ValueError(f"{location.file} is truncated")
            target.write(block)
            remaining -= len(block)


LAST_HIDDEN_STATE, ATTENTION_MASK, TOKEN_TYPE_IDS = "last_hidden_state", "attention_mask", "token_type_ids"
_NODE_PREFIX = "pooling."
_AXES_BY_INPUT = 18  # of ReduceMax
_EPSILONS = {"count": 1e-9, "length": 1e-12}


def add_pooling(path: Path, rules: SentenceRules) -> None:
    """Make the graph in `path` return `sentence_embedding` float32 [B, D], and take ids and mask only.

    A graph that already returns vectors keeps its own pooling. `token_type_ids` become zeros inside of it,
    their value for single texts.
    """
    import onnx

    model = onnx.ModelProto.FromString(path.read_bytes())
    graph = model.graph
    if all(output.name != EMBEDDING_OUTPUT for output in graph.output):
        _PoolingNodes(model).pool(rules)
    if any(value.name == TOKEN_TYPE_IDS for value in graph.input):
        _remove_token_types(graph)
    path.write_bytes(model.SerializeToString())


class _PoolingNodes:
    """Adds nodes after those of a graph."""

    def __init__(self, model: Any) -> None:
        self.graph = model.graph
        self.opset = opset_versions(model)[""]

    def pool(self, rules: SentenceRules) -> None:
        from onnx import TensorProto, helper

        pooling_nodes = [
            copy_message(node) for node in nodes_for_outputs(self.graph.node, [LAST_HIDDEN_STATE])
        ]  # other nodes may have our names
        del self.graph.node[:]
        self.graph.node.extend(pooling_nodes)
        hidden = self.node("Cast", LAST_HIDDEN_STATE, to=TensorProto.FLOAT)
        mask = self.node("Cast", ATTENTION_MASK, to=TensorProto.FLOAT)
        vector = {"mean": self._mean_pooling, "cls": self._cls_pooling, "max": self._max_pooling}[
            rules.pooling
        ](hidden, mask)
        if rules.normalize:
            vector = self._normalized(vector)
        self.graph.node.append(
            helper.make_node("Identity", [vector], [EMBEDDING_OUTPUT], f"{_NODE_PREFIX}{EMBEDDING_OUTPUT}")
        )
        old = next(output for output in self.graph.output if output.name == LAST_HIDDEN_STATE)
        dims = old.type.tensor_type.shape.dim
        sizes = [d.dim_param or d.dim_value or None for d in dims] if len(dims) == 3 else [None] * 3
        del self.graph.output[:]
        self.graph.output.append(
            helper.make_tensor_value_info(EMBEDDING_OUTPUT, TensorProto.FLOAT, [sizes[0], sizes[2]])
        )

    def _cls_pooling(self, hidden: str, mask: str) -> str:
        return self.node("Gather", hidden, self.constant(0), axis=1)

    def _mean_pooling(self, hidden: str, mask: str) -> str:
        row, column = self.reshape(mask, [0, 1, -1]), self.reshape(mask, [0, -1, 1])
        zero = self.constant(0)
        total = self.node("Gather", self.node("MatMul", row, hidden), zero, axis=1)  # [B, D]
        count = self.node("Gather", self.node("MatMul", row, column), zero, axis=1)  # [B, 1]
        return self.node("Div", total, self.node("Max", count, self.constant(np.float32(_EPSILONS["count"]))))

    def _max_pooling(self, hidden: str, mask: str) -> str:
        column = self.reshape(mask, [0, -1, 1])
        unmasked = self.node("Greater", column, self.constant(np.float32(0)))
        masked = self.node("Where", unmasked, hidden, self.constant(np.float32(-np.inf)))
        if self.opset >= _AXES_BY_INPUT:
            return self.node("ReduceMax", masked, self.constant([1]), keepdims=0)
        return self.node("ReduceMax", masked, axes=[1], keepdims=0)

    def _normalized(self, vector: str) -> str:
        row, column = self.reshape(vector, [0, 1, -1]), self.reshape(vector, [0, -1, 1])
        length = self.reshape(self.node("Sqrt", self.node("MatMul", row, column)), [0, 1])
        return self.node(
            "Div", vector, self.node("Max", length, self.constant(np.float32(_EPSILONS["length"])))
        )

    def reshape(self, value: str, sizes: list[int]) -> str:
        return self.node("Reshape", value, self.constant(sizes))

    def constant(self, value: Any) -> str:
        from onnx import numpy_helper

        name = f"{_NODE_PREFIX}constant_{len(self.graph.initializer)}"
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        from onnx import helper

        name = f"{_NODE_PREFIX}{operator}_{len(self.graph.node)}"
        self.graph.node.append(helper.make_node(operator, list(inputs), [name], name, **attributes))
        return name


def _remove_token_types(graph: Any) -> None:
    """Replace the input `token_type_ids` by zeros of the shape of the ids, in place."""
    from onnx import helper

    value = next(value for value in graph.input if value.name == TOKEN_TYPE_IDS)
    graph.input.remove(value)
    zero = helper.make_tensor("zero", value.type.tensor_type.elem_type, [1], [0])
    shape = f"{TOKEN_TYPE_IDS}.shape"
    nodes = [
        helper.make_node("Shape", ["input_ids"], [shape], shape),
        helper.make_node("ConstantOfShape", [shape], [TOKEN_TYPE_IDS], TOKEN_TYPE_IDS, value=zero),
    ]
    old = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *old])


# in standard deviations of the compared values: float32 differs by order of summation, int8 values change
_TOLERANCE, _TOLERANCE_LOW_PRECISION = 1e-3, 0.1
_IDS = np.array([[3, 4, 5, 2, 4, 1], [4, 3, 2, 1, 0, 0]])  # ids of every vocabulary
_MASK = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
_QUANTIZING_OPS = {"DynamicQuantizeLinear", "QuantizeLinear", "MatMulNBits", "DynamicQuantizeMatMul"}
_NUMPY_DTYPES = {"tensor(float16)": np.float16}


class GeneratorPaths(NamedTuple):
    """smelt's graphs (a language model has no encoder), and Optimum's graphs for comparison."""

    decoder: Path
    encoder: Path | None = None
    first: Path | None = None
    source: Path | None = None


def verify_generator(
    paths: GeneratorPaths, cache_shape: tuple[int, int] | None, origin: str
) -> dict[str, tuple[int, int]]:
    """Compare the graphs; return heads and width of every cache of the decoder, by input name.

    Args:
        paths: of the graphs.
        cache_shape: heads and width from the config, for a graph without its own.
        origin: the model's name in messages.

    Raises:
        InputError: results differ, a graph fails or crashes, or it takes too much memory or time.
    """
    limits = [trial_limits(path, {}) for path in paths if path is not None]
    most = ProcessLimits(max(x.memory_bytes for x in limits) * 2, sum(x.seconds for x in limits))
    paths_json = json.dumps([None if path is None else str(path) for path in paths])
    try:
        reply = run_isolated(__name__, [paths_json, json.dumps(cache_shape)], most)
    except IsolatedProcessError as error:
        raise InputError(
            f"{origin}: a trial run of the graphs failed: {error}.", code="graph-failed"
        ) from error
    if "problem" in reply:
        raise InputError(f"{origin}: {reply['problem']}.", code=reply["code"])
    return {name: (heads, width) for name, (heads, width) in reply["caches"].items()}


def subprocess_main(arguments: Sequence[str]) -> dict[str, Any]:
    """Compare the graphs of `arguments` in this process."""
    decoder, *other_paths = json.loads(arguments[0])
    paths = GeneratorPaths(Path(decoder), *(None if name is None else Path(name) for name in other_paths))
    cache_shape = json.loads(arguments[1])
    try:
        if paths.encoder is None:
            return {"caches": _verify_decoder(paths, cache_shape)}
        return {"caches": _verify_encoder_decoder(paths, cache_shape)}
    except MemoryError:
        raise
    except ValueError as error:
        return {"problem": str(error), "code": "parity-failed"}
    except Exception as error:  # ONNX Runtime's exceptions have no other common base
        return {
            "problem": "ONNX Runtime cannot run its graphs: " + " ".join(str(error).split())[:400],
            "code": "graph-failed",
        }


def _verify_encoder_decoder(paths: GeneratorPaths, cache_shape: Sequence[int] | None) -> dict[str, Any]:
    encoder, decoder, first, source = map(_open, (paths.encoder, paths.decoder, paths.first, paths.source))
    allowed = _tolerance_for(paths)
    encoder_feeds = {"input_ids": _IDS, "attention_mask": _MASK}
    expected = _run(source, encoder_feeds)
    hidden_states = expected["last_hidden_state"]
    start = np.full((2, 1), 1)
    states = {ENCODER_HIDDEN_STATES: hidden_states, "encoder_attention_mask": _MASK}
    empty_caches = dict(
        _empty_caches(first, cache_shape, rows=2)
    )  # a merged graph may be used for the first token too
    present = _run(first, {"input_ids": start} | states | empty_caches)
    encoded = _run(encoder, encoder_feeds)
    is_token = _MASK == 1
    _require_close("the encoder", encoded["last_hidden_state"][is_token], hidden_states[is_token], allowed)
    cross_outputs = {name: value for name, value in encoded.items() if name.startswith(PRESENT_PREFIX)}
    for name, value in cross_outputs.items():
        _require_close(
            name, np.moveaxis(value, 1, 2)[is_token], np.moveaxis(present[name], 1, 2)[is_token], allowed
        )
    cross_caches = {
        PAST_PREFIX + name.removeprefix(PRESENT_PREFIX): value for name, value in cross_outputs.items()
    }
    self_caches = {
        PAST_PREFIX + name.removeprefix(PRESENT_PREFIX): value[:, :, :0]
        for name, value in present.items()
        if name.startswith(PRESENT_PREFIX) and name not in cross_outputs
    }
    inputs = {"input_ids": start, "encoder_attention_mask": _MASK} | cross_caches
    try:
        decoded = _run(decoder, inputs | self_caches)
    except Exception as error:
        raise ValueError(
            "the decoder with caches fails at the first token, with empty caches:"
            f" {' '.join(str(error).split())[:200]}"
        ) from error
    description = "the first token, by the decoder for later ones with empty caches,"
    _require_close(description, decoded["logits"], present["logits"][:, -1], allowed)
    return {name: (value.shape[1], value.shape[3]) for name, value in {**cross_caches, **self_caches}.items()}


def _verify_decoder(paths: GeneratorPaths, cache_shape: Sequence[int] | None) -> dict[str, Any]:
    session, allowed = _open(paths.decoder), _tolerance_for(paths)
    ids, one_row_mask = _IDS[:1], np.ones((1, 6), np.int64)
    caches = dict(_empty_caches(session, cache_shape))
    full_logits, _ = _step(session, ids, one_row_mask, caches)
    for description, split_points in (("in two parts", [3]), ("token by token", list(range(1, 6)))):
        part_caches, parts = caches, []
        for begin, end in zip([0, *split_points], [*split_points, 6], strict=True):
            logits, part_caches = _step(session, ids[:, begin:end], one_row_mask[:, :end], part_caches)
            parts.append(logits)
        _require_close(f"a prompt {description}", np.concatenate(parts, 1), full_logits, allowed)
    padded = np.concatenate([np.zeros((1, 2), np.int64), ids[:, :4]], 1)
    both_ids, mask = np.concatenate([ids, padded]), np.array([[1] * 6, [0, 0, 1, 1, 1, 1]])
    doubled_caches = {name: np.repeat(value, 2, 0) for name, value in caches.items()}
    logits, final_caches = _step(session, both_ids, mask, doubled_caches)
    _require_close("a prompt padded on the left", logits[1, 2:], full_logits[0, :4], allowed)
    return {name: (value.shape[1], value.shape[3]) for name, value in final_caches.items()}


def _step(session: Any, ids: Any, mask: Any, caches: Feeds) -> tuple[Any, dict[str, Any]]:
    positions = np.where(mask == 0, 0, mask.cumsum(1) - 1)[:, -ids.shape[1] :]
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions} | dict(caches)
    results = _run(session, inputs)
    return results["logits"], {
        PAST_PREFIX + n.removeprefix(PRESENT_PREFIX): v
        for n, v in results.items()
        if n.startswith(PRESENT_PREFIX)
    }


def _empty_caches(
    session: Any, cache_shape: Sequence[int] | None, rows: int = 1
) -> Iterator[tuple[str, NDArray[Any]]]:
    for item in session.get_inputs():
        if item.name.startswith(PAST_PREFIX):
            sizes = (item.shape[1], item.shape[3])
            heads, width = sizes if all(isinstance(size, int) for size in sizes) else cache_shape or (1, 1)
            yield item.name, np.zeros((rows, heads, 0, width), _NUMPY_DTYPES.get(item.type, np.float32))


def _open(path: Path | None) -> Any:
    from smelt.runtimes.onnx_session import open_onnx_session

    assert path is not None
    return open_onnx_session(path, threads=1)


def _run(session: Any, feeds: Feeds) -> dict[str, NDArray[Any]]:
    input_names = {item.name for item in session.get_inputs()}
    names = [output.name for output in session.get_outputs()]
    inputs = {name: value for name, value in feeds.items() if name in input_names}
    return dict(zip(names, session.run(names, inputs), strict=True))


def _require_close(what: str, got: NDArray[Any], expected: NDArray[Any], allowed: float) -> None:
    """Require that two arrays are equal apart from rounding.

    Raises:
        ValueError: they differ.
    """
    if got.shape != expected.shape:
        raise ValueError(f"{what} returns {list(got.shape)}, expected {list(expected.shape)}")
    a, b = got.astype(np.float64), expected.astype(np.float64)
    deviation = float(np.abs(a - b).max(initial=0.0)) / (float(b.std()) or 1.0)
    if not deviation <= allowed:
        raise ValueError(
            f"{what} differs from its graphs in sequence (largest difference {deviation:.2g} of the standard"
            " deviation)"
        )


def _tolerance_for(paths: GeneratorPaths) -> float:
    """Return the tolerance of outputs: larger where graphs round activations or use half precision."""
    from onnx import TensorProto, load

    for path in (path for path in paths if path is not None):
        graph = load(path, load_external_data=False).graph
        kinds = {tensor.data_type for tensor in graph.initializer}
        if TensorProto.FLOAT16 in kinds or _QUANTIZING_OPS & {node.op_type for node in graph.node}:
            return _TOLERANCE_LOW_PRECISION
    return _TOLERANCE


_HEADS_KEYS = ("num_key_value_heads", "num_attention_heads", "n_head", "num_heads")
_WIDTH_KEYS = ("hidden_size", "d_model", "n_embd")


def import_generator(files: Mapping[str, Path], config: Mapping[str, Any], out: Path) -> None:
    """Write the graphs of smelt's runners into the folder `out`.

    Args:
        files: those of a layout in `convert_optimum.py`, by name without `.onnx`, all in one folder.
        config: the model's config.json.
        out: of the artifact.

    Raises:
        InputError: they do not match, or the converted graphs compute different results.
    """
    models = {name: _read_inlined(path) for name, path in files.items()}
    origin = next(iter(files.values())).parent
    if MODEL_GRAPH in models:
        try:
            decoder = convert_decoder_only(models[MODEL_GRAPH])
        except InputError as error:
            raise InputError(f"{files[MODEL_GRAPH]}: {error}.", code=error.code) from error
        path = write_with_external_data(decoder, files[MODEL_GRAPH], out / f"{MODEL_GRAPH}.onnx")
        caches = verify_generator(
            GeneratorPaths(path), _cache_shape_from_config(config), str(files[MODEL_GRAPH])
        )
        _write_cache_shapes(path, caches)
        return
    try:
        encoder, decoder, first = convert_encoder_decoder(models)
    except InputError as error:
        raise InputError(f"{origin}: {error}.", code=error.code) from error
    source = files[MERGED_DECODER_GRAPH] if MERGED_DECODER_GRAPH in files else files[DECODER_WITH_PAST_GRAPH]
    with TemporaryDirectory(dir=out.parent) as space:
        first_decoder = files.get(FIRST_DECODER_GRAPH) or write_with_external_data(
            first, source, Path(space, f"{FIRST_DECODER_GRAPH}.onnx")
        )
        encoder_path = write_with_external_data(encoder, files[ENCODER_GRAPH], out / f"{ENCODER_GRAPH}.onnx")
        path = write_with_external_data(decoder, source, out / f"{DECODER_WITH_PAST_GRAPH}.onnx")
        caches = verify_generator(
            GeneratorPaths(path, encoder_path, first_decoder, files[ENCODER_GRAPH]),
            _cache_shape_from_config(config),
            str(origin),
        )
    _write_cache_shapes(path, caches)


def _read_inlined(path: Path) -> Any:
    """Return the onnx.ModelProto in `path` with functions inlined; external weights stay external."""
    import onnx
    from onnx import inliner

    model = onnx.ModelProto.FromString(path.read_bytes())
    return inliner.inline_local_functions(model) if model.functions else model


def _write_cache_shapes(path: Path, caches: Mapping[str, tuple[int, int]]) -> None:
    """Write heads and width of the caches into the graph in `path`, where it has no numbers."""
    import onnx

    model = onnx.ModelProto.FromString(path.read_bytes())
    set_cache_shapes(model, caches)
    path.write_bytes(model.SerializeToString())


def _cache_shape_from_config(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return heads and head width of the caches from the usual keys of a config."""
    heads = next(
        (config[config_key] for config_key in _HEADS_KEYS if isinstance(config.get(config_key), int)), None
    )
    all_heads = next(
        (config[config_key] for config_key in _HEADS_KEYS[1:] if isinstance(config.get(config_key), int)),
        None,
    )
    width = next(
        (config[config_key] for config_key in _WIDTH_KEYS if isinstance(config.get(config_key), int)), None
    )
    if not heads or not width or not all_heads:
        return None
    head_width = config.get("head_dim")
    return heads, head_width if isinstance(head_width, int) else width // all_heads
