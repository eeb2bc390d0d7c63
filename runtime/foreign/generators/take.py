"""Graphs of somebody else that generate, as those of an artifact, once it is seen that they compute so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from smelt.core.errors import InputError
from smelt.runtime.foreign.generators.convert import in_one, in_two, set_caches
from smelt.runtime.foreign.generators.layout import ENCODER, FIRST, MERGED, MODEL, NEXT
from smelt.runtime.foreign.generators.trial import Paths, try_generator
from smelt.runtime.foreign.take import write_gathered

_HEADS = ("num_key_value_heads", "num_attention_heads", "n_head", "num_heads")
_WIDTH = ("hidden_size", "d_model", "n_embd")


def take_generator(files: Mapping[str, Path], config: Mapping[str, Any], out: Path) -> None:
    """Write the graphs that smelt's runners call into the folder `out`.

    Args:
        files: those of a layout in `layout.py`, by name without `.onnx`, all in one folder.
        config: the model's config.json.
        out: of the artifact.

    Raises:
        InputError: they do not go together, or what was made of them computes something else.
    """
    models = {name: _read(path) for name, path in files.items()}
    origin = next(iter(files.values())).parent
    if MODEL in models:
        try:
            decoder = in_one(models[MODEL])
        except InputError as error:
            raise InputError(f"{files[MODEL]}: {error}.", code=error.code) from error
        path = write_gathered(decoder, files[MODEL], out / f"{MODEL}.onnx")
        caches = try_generator(Paths(path), _usual(config), str(files[MODEL]))
        _say_caches(path, caches)
        return
    try:
        encoder, decoder, first = in_two(models)
    except InputError as error:
        raise InputError(f"{origin}: {error}.", code=error.code) from error
    source = files[MERGED] if MERGED in files else files[NEXT]
    with TemporaryDirectory(dir=out.parent) as space:
        beside = files.get(FIRST) or write_gathered(first, source, Path(space, f"{FIRST}.onnx"))
        made = write_gathered(encoder, files[ENCODER], out / f"{ENCODER}.onnx")
        path = write_gathered(decoder, source, out / f"{NEXT}.onnx")
        caches = try_generator(Paths(path, made, beside, files[ENCODER]), _usual(config), str(origin))
    _say_caches(path, caches)


def _read(path: Path) -> Any:
    """Return the onnx.ModelProto in `path`, functions put where they are called; outside weights stay so."""
    import onnx
    from onnx import inliner

    model = onnx.ModelProto.FromString(path.read_bytes())
    return inliner.inline_local_functions(model) if model.functions else model


def _say_caches(path: Path, caches: Mapping[str, tuple[int, int]]) -> None:
    """Write heads and width of the caches into the graph in `path`, where it says no numbers."""
    import onnx

    model = onnx.ModelProto.FromString(path.read_bytes())
    set_caches(model, caches)
    path.write_bytes(model.SerializeToString())


def _usual(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return heads that cache and their width as a config says them in the plainest way."""
    heads = next((config[word] for word in _HEADS if isinstance(config.get(word), int)), None)
    all_heads = next((config[word] for word in _HEADS[1:] if isinstance(config.get(word), int)), None)
    width = next((config[word] for word in _WIDTH if isinstance(config.get(word), int)), None)
    if not heads or not width or not all_heads:
        return None
    said = config.get("head_dim")
    return heads, said if isinstance(said, int) else width // all_heads
