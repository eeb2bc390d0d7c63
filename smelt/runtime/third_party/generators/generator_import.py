"""Imports third-party generating graphs as those of an artifact, after verification."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from smelt.core.errors import InputError
from smelt.runtime.third_party.generators.convert_optimum import (
    convert_decoder_only,
    convert_encoder_decoder,
    set_cache_shapes,
)
from smelt.runtime.third_party.generators.optimum_layout import (
    DECODER_WITH_PAST_GRAPH,
    ENCODER_GRAPH,
    FIRST_DECODER_GRAPH,
    MERGED_DECODER_GRAPH,
    MODEL_GRAPH,
)
from smelt.runtime.third_party.generators.verify_generator import GeneratorPaths, verify_generator
from smelt.runtime.third_party.import_graph import write_with_external_data

_HEADS_KEYS = ("num_key_value_heads", "num_attention_heads", "n_head", "num_heads")
_WIDTH_KEYS = ("hidden_size", "d_model", "n_embd")


def import_generator(files: Mapping[str, Path], config: Mapping[str, Any], out: Path) -> None:
    """Write the graphs of smelt's runners into the folder `out`.

    Args:
        files: those of a layout in `optimum_layout.py`, by name without `.onnx`, all in one folder.
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
        beside = files.get(FIRST_DECODER_GRAPH) or write_with_external_data(
            first, source, Path(space, f"{FIRST_DECODER_GRAPH}.onnx")
        )
        made = write_with_external_data(encoder, files[ENCODER_GRAPH], out / f"{ENCODER_GRAPH}.onnx")
        path = write_with_external_data(decoder, source, out / f"{DECODER_WITH_PAST_GRAPH}.onnx")
        caches = verify_generator(
            GeneratorPaths(path, made, beside, files[ENCODER_GRAPH]),
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
    heads = next((config[word] for word in _HEADS_KEYS if isinstance(config.get(word), int)), None)
    all_heads = next((config[word] for word in _HEADS_KEYS[1:] if isinstance(config.get(word), int)), None)
    width = next((config[word] for word in _WIDTH_KEYS if isinstance(config.get(word), int)), None)
    if not heads or not width or not all_heads:
        return None
    said = config.get("head_dim")
    return heads, said if isinstance(said, int) else width // all_heads
