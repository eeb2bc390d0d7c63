"""Which files of a model's folder hold its weights, and what is in them; read without torch.

The choice is that of transformers' `from_pretrained` (`modeling_utils._get_resolved_checkpoint_files`): the
file that the config's `transformers_weights` names, else `model.safetensors`, else the shards that
`model.safetensors.index.json` lists. Variants (`model.fp16.safetensors`) are taken only by who asks for
one, which smelt never does: they, and all other files, are no part of the model.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.files import load_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NAMED = "transformers_weights"  # in a config: the file with the weights, or their index
# A safetensors header longer than this is damaged (the format's own limit, 100 MB).
_LONGEST_HEADER = 100_000_000
_AGAIN = "Copy or download it again."


@dataclass(frozen=True)
class WeightFiles:
    """The weights of a model.

    files: the safetensors files, in order. index: the file that lists them, of a model in several.
    places: by that list the name of the file that holds each tensor.
    """

    files: tuple[Path, ...]
    index: Path | None = None
    places: Mapping[str, str] = field(default_factory=dict)

    def takes(self, path: Path, tensor: str) -> bool:
        """Say whether `tensor` is to be read from the file `path`, one of `files`."""
        return self.places.get(tensor, path.name) == path.name

    def require(self, path: Path, found: Mapping[str, Any]) -> None:
        """Require that the tensors `found` in `path` are all that the index lists for it.

        Raises:
            InputError: one is missing.
        """
        missing = [name for name, file in self.places.items() if file == path.name and name not in found]
        if missing:
            more = f", nor {len(missing) - 1:,} others" if len(missing) > 1 else ""
            raise InputError(
                f"{path}: the tensor '{missing[0][:80]}' is not in this file{more}, and {INDEX} says that it"
                f" is. {_AGAIN}",
                code="missing-tensor",
            )


def find_weights(folder: Path) -> WeightFiles:
    """Return the files with the weights of the model in `folder`.

    Raises:
        InputError: there are none, or the index is none, or names a file that is not in the folder.
    """
    if (named := _named_by_config(folder)) is not None:
        path = _inside(folder, named, folder / "config.json")
        return _indexed(path) if named.endswith(".index.json") else WeightFiles((path,))
    if (folder / WEIGHTS).is_file():
        return WeightFiles((folder / WEIGHTS,))
    if (folder / INDEX).is_file():
        return _indexed(folder / INDEX)
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    hint = f" There is {others[0]}; rename it if it holds the whole model." if others else ""
    raise InputError(
        f"{folder}: no weights in this folder; expected {WEIGHTS}.{hint}", code="missing-weights"
    )


def has_weights(folder: Path) -> bool:
    """Say whether `folder` holds safetensors weights, good or not, under a name that is looked for."""
    return (folder / WEIGHTS).is_file() or (folder / INDEX).is_file() or _named_by_config(folder) is not None


def weight_tensors(folder: Path) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """Yield file, name and header entry (dtype, shape, data_offsets) of every tensor of the model, each once.

    Raises:
        InputError: there are no weights, or a file of them is missing, damaged or incomplete.
    """
    weights = find_weights(folder)
    for path in weights.files:
        header = read_header(path)
        header.pop("__metadata__", None)
        weights.require(path, header)
        for name, entry in header.items():
            if weights.takes(path, name):
                yield path, name, entry


def values_in(entry: Mapping[str, Any]) -> int:
    """Return how many values the tensor of a header's entry has."""
    return math.prod(entry["shape"])


# Names of sizes in the configs of transformers; every one but the first kind is an axis of some tensor.
_COUNTS = re.compile(r"(n|num)(_hidden|_encoder|_decoder)?_layers?|(encoder|decoder)_layers|depths")
_SIZES = re.compile(
    r".*(vocab|hidden|intermediate|embedding)_sizes?|hidden_dim|d_model|d_ff|d_kv|n_embd|n_inner|.*_ffn_dim|dim"
)
_PACKED = 32  # quantized weights that one stored value may hold
_SHARED = 16  # layers for each stored tensor: layers that share their weights are stored once


def oversized(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return which size of the config the stored tensors cannot fill; None where they can.

    Only headers are read. Otherwise a model of such a config would be built, and take minutes and all memory,
    before its weights are missed.

    Raises:
        InputError: there are no weights, or a file of them is missing, damaged or incomplete.
    """
    tensors = values = 0
    for _, _, entry in weight_tensors(folder):
        tensors += 1
        values += math.prod(entry["shape"])
    for name, said in config.items():
        found = [x for x in (said if isinstance(said, list) else [said]) if type(x) is int]
        size = sum(found) if name == "depths" else max(found, default=0)
        most, of = (_SHARED * tensors, "tensors") if _COUNTS.fullmatch(name) else (_PACKED * values, "values")
        if (of == "tensors" or _SIZES.fullmatch(name)) and size > most:
            stored = tensors if of == "tensors" else values
            return f"{folder / 'config.json'}: {name} is {size:,}, and the weights have only {stored:,} {of}."
    return None


def read_header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: name -> dtype, shape, data_offsets.

    Format: 8 bytes little-endian length, then JSON (https://huggingface.co/docs/safetensors).

    Raises:
        InputError: the file is missing, damaged or no safetensors file.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= min(_LONGEST_HEADER, path.stat().st_size - 8):
                raise InputError(
                    f"{path}: not a safetensors file, or cut off: its header cannot be read.",
                    code="damaged-weights",
                )
            header = json.loads(stream.read(length))
    except FileNotFoundError as error:
        raise InputError(f"{path}: this file of the weights is missing.", code="missing-file") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}.", code="unreadable-file") from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: the safetensors header is damaged: {error}.", code="damaged-weights"
        ) from error
    if not isinstance(header, dict):
        raise InputError(
            f"{path}: the safetensors header is damaged: it is no JSON object.", code="damaged-weights"
        )
    return header


def _indexed(index: Path) -> WeightFiles:
    """Return the weights that an index lists.

    Raises:
        InputError: it is no index, or a file that it names is not beside it.
    """
    try:
        places = {str(k): str(v) for k, v in load_json(index)["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{index}: not an index of weights: {error}", code="damaged-file") from error
    if not places:
        raise InputError(f"{index}: not an index of weights: it lists none.", code="empty-index")
    files = tuple(_inside(index.parent, name, index) for name in sorted(set(places.values())))
    for path in files:
        if not path.is_file():
            raise InputError(
                f"{path}: this file of the weights is missing; {index.name} names it. {_AGAIN}",
                code="missing-file",
            )
    return WeightFiles(files, index, places)


def _inside(folder: Path, name: str, where: Path) -> Path:
    """Return the file `name` of `folder`, as the file `where` calls it.

    Raises:
        InputError: it would lie elsewhere.
    """
    if not name or Path(name).name != name or "\\" in name or "\0" in name or name == "..":
        raise InputError(
            f"{where}: the file name {name!r} leads out of the folder.", code="path-outside-folder"
        )
    return folder / name


def _named_by_config(folder: Path) -> str | None:
    """Return the file that the config names as that of the weights, if it does."""
    try:
        config = load_json(folder / "config.json")
    except (OSError, ValueError, RecursionError):
        return None  # said where the config is read
    named = config.get(NAMED) if isinstance(config, dict) else None
    return (
        named
        if isinstance(named, str) and named.endswith((".safetensors", ".safetensors.index.json"))
        else None
    )
