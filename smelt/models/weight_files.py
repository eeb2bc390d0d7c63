"""The weight files of a model's folder, and their tensors, used and unused; listed without torch.

The selection is that of transformers' `from_pretrained` (`modeling_utils._get_resolved_checkpoint_files`):
the file of the config's `transformers_weights`, else `model.safetensors`, else the shards listed in
`model.safetensors.index.json`. Variants (`model.fp16.safetensors`) must be requested explicitly, which smelt
never does: they, and all other files, are not part of the model.

Some tensors of checkpoints are not used by their models. They were stored by older versions of transformers,
and the libraries before it: masks and position numbers that are computed today, and heads and poolers of the
pretraining. Each family lists them (`smelt.models.families`), as each model class of transformers lists some
in `_keys_to_ignore_on_load_unexpected`. Any other tensor without a parameter in the model is an error: it
would be lost.
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
from smelt.core.files import MANIFEST, is_artifact_file, load_json, read_json_object
from smelt.models.families.registry import FAMILIES
from smelt.models.text_rules import MODULES_FILE, SENTENCE_CONFIG_FILE

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_CONFIG_KEY = "transformers_weights"  # in a config: the file with the weights, or their index
LARGE_BYTES = 2**30  # a model whose files are larger is processed block by block
# A safetensors header longer than this is damaged (the format's own limit, 100 MB).
_MAX_HEADER_BYTES = 100_000_000
_COPY_AGAIN_HINT = "Copy or download the file again."
TOKENIZER_SUFFIXES = {".json", ".spm", ".model", ".txt", ".jinja"}


@dataclass(frozen=True)
class WeightFiles:
    """The weights of a model.

    files: the safetensors files, in order. index: the file that lists them, for several files.
    tensor_files: the file name of each tensor in that list.
    """

    files: tuple[Path, ...]
    index: Path | None = None
    tensor_files: Mapping[str, str] = field(default_factory=dict)

    def holds(self, path: Path, tensor: str) -> bool:
        """Return whether `tensor` is to be read from the file `path`, one of `files`."""
        return self.tensor_files.get(tensor, path.name) == path.name

    def require_complete(self, path: Path, tensors: Mapping[str, Any]) -> None:
        """Require that the tensors `tensors` in `path` are all that the index lists for it.

        Raises:
            InputError: one is missing.
        """
        missing = [
            name for name, file in self.tensor_files.items() if file == path.name and name not in tensors
        ]
        if missing:
            extra = f", nor {len(missing) - 1:,} others" if len(missing) > 1 else ""
            raise InputError(
                f"{path}: the tensor '{missing[0][:80]}' is not in this file{extra}, but {WEIGHTS_INDEX_FILE}"
                f" lists it there. {_COPY_AGAIN_HINT}",
                code="missing-tensor",
            )


def find_weights(folder: Path) -> WeightFiles:
    """Return the weight files of the model in `folder`.

    Raises:
        InputError: there are none, or the index is invalid, or lists a file that is not in the folder.
    """
    if (file_name := _named_by_config(folder)) is not None:
        path = _file_in_folder(folder, file_name, folder / "config.json")
        return _read_index(path) if file_name.endswith(".index.json") else WeightFiles((path,))
    if (folder / WEIGHTS_FILE).is_file():
        return WeightFiles((folder / WEIGHTS_FILE,))
    if (folder / WEIGHTS_INDEX_FILE).is_file():
        return _read_index(folder / WEIGHTS_INDEX_FILE)
    file_names = sorted(path.name for path in folder.glob("*.safetensors"))
    hint = f" There is {file_names[0]}; rename it if it contains the whole model." if file_names else ""
    raise InputError(f"{folder}: no weights found; expected {WEIGHTS_FILE}.{hint}", code="missing-weights")


def weight_files_size(folder: Path) -> int:
    """Return the total size of the weight files in `folder`, bytes."""
    return sum(path.stat().st_size for path in find_weights(folder).files)


def is_large(folder: Path) -> bool:
    """Return whether the model in `folder` is processed block by block, where that gives the same result."""
    return weight_files_size(folder) > LARGE_BYTES


def has_weights(folder: Path) -> bool:
    """Return whether `folder` has safetensors weights, valid or not, under a supported name."""
    return (
        (folder / WEIGHTS_FILE).is_file()
        or (folder / WEIGHTS_INDEX_FILE).is_file()
        or _named_by_config(folder) is not None
    )


def source_files(src: Path) -> list[Path]:
    """Return the files that are read of the model folder `src`: weights, settings and texts.

    Raises:
        InputError: there are no weights, or a file of them is missing.
    """
    weights = find_weights(src)
    # an index that is not used may name missing files
    left_out = {MANIFEST, WEIGHTS_INDEX_FILE} - ({weights.index.name} if weights.index else set())
    left_out |= {MODULES_FILE, SENTENCE_CONFIG_FILE}  # their content is in `SentenceRules`
    texts = [
        path
        for path in src.iterdir()
        if path.suffix in TOKENIZER_SUFFIXES and is_artifact_file(path.name) and path.is_file()
    ]  # no LICENSE.txt, no requirements.txt
    return sorted({*weights.files, *(path for path in texts if path.name not in left_out)})


def weight_tensors(folder: Path) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """Yield file, name and header entry (dtype, shape, data_offsets) of every tensor of the model, each once.

    Raises:
        InputError: there are no weights, or a file of them is missing, damaged or incomplete.
    """
    weights = find_weights(folder)
    for path in weights.files:
        header = read_header(path)
        header.pop("__metadata__", None)
        weights.require_complete(path, header)
        for name, entry in header.items():
            if weights.holds(path, name):
                yield path, name, entry


def value_count(entry: Mapping[str, Any]) -> int:
    """Return the number of values of the tensor of a header's entry."""
    return math.prod(entry["shape"])


# Names of sizes in the configs of transformers; all but the first kind are an axis of some tensor.
_LAYER_COUNT_KEYS = re.compile(r"(n|num)(_hidden|_encoder|_decoder)?_layers?|(encoder|decoder)_layers|depths")
_SIZE_KEYS = re.compile(
    r".*(vocab|hidden|intermediate|embedding)_sizes?|hidden_dim|d_model|d_ff|d_kv|n_embd|n_inner|.*_ffn_dim|dim"
)
_MAX_PACKING_FACTOR = 32  # quantized weights that one stored value may hold
_MAX_SHARING_FACTOR = 16  # layers for each stored tensor: layers that share their weights are stored once


def oversized_setting(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the size of the config that the stored tensors cannot fill; None where they can.

    Only headers are read. Otherwise a model of such a config would be built, and take minutes and all memory,
    before the missing weights are noticed.

    Raises:
        InputError: there are no weights, or a file of them is missing, damaged or incomplete.
    """
    tensors = values = 0
    for _, _, entry in weight_tensors(folder):
        tensors += 1
        values += math.prod(entry["shape"])
    for name, value in config.items():
        integers = [x for x in (value if isinstance(value, list) else [value]) if type(x) is int]
        size = sum(integers) if name == "depths" else max(integers, default=0)
        most, of = (
            (_MAX_SHARING_FACTOR * tensors, "tensors")
            if _LAYER_COUNT_KEYS.fullmatch(name)
            else (_MAX_PACKING_FACTOR * values, "values")
        )
        if (of == "tensors" or _SIZE_KEYS.fullmatch(name)) and size > most:
            stored = tensors if of == "tensors" else values
            return f"{folder / 'config.json'}: {name} is {size:,}, but the weights have only {stored:,} {of}."
    return None


def read_header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: name -> dtype, shape, data_offsets.

    Format: 8 bytes little-endian length, then JSON (https://huggingface.co/docs/safetensors).

    Raises:
        InputError: the file is missing, damaged or not a safetensors file.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= min(_MAX_HEADER_BYTES, path.stat().st_size - 8):
                raise InputError(
                    f"{path}: not a safetensors file, or truncated: its header cannot be read.",
                    code="damaged-weights",
                )
            header = json.loads(stream.read(length))
    except FileNotFoundError as error:
        raise InputError(f"{path}: this weight file is missing.", code="missing-file") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}.", code="unreadable-file") from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: the safetensors header is damaged: {error}.", code="damaged-weights"
        ) from error
    if not isinstance(header, dict):
        raise InputError(
            f"{path}: the safetensors header is damaged: it is not a JSON object.", code="damaged-weights"
        )
    return header


def _read_index(index: Path) -> WeightFiles:
    """Return the weights that an index lists.

    Raises:
        InputError: it is not an index, or a listed file is not in its folder.
    """
    try:
        files_by_tensor = {str(k): str(v) for k, v in load_json(index)["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{index}: not a valid weight index: {error}", code="damaged-file") from error
    if not files_by_tensor:
        raise InputError(f"{index}: not a valid weight index: it is empty.", code="empty-index")
    files = tuple(
        _file_in_folder(index.parent, name, index) for name in sorted(set(files_by_tensor.values()))
    )
    for path in files:
        if not path.is_file():
            raise InputError(
                f"{path}: this weight file is missing; {index.name} lists it. {_COPY_AGAIN_HINT}",
                code="missing-file",
            )
    return WeightFiles(files, index, files_by_tensor)


def _file_in_folder(folder: Path, name: str, where: Path) -> Path:
    """Return the file `name` of `folder`, as listed in the file `where`.

    Raises:
        InputError: the name leads out of the folder.
    """
    if not name or Path(name).name != name or "\\" in name or "\0" in name or name == "..":
        raise InputError(
            f"{where}: the file name {name!r} points outside the folder.", code="path-outside-folder"
        )
    return folder / name


def _named_by_config(folder: Path) -> str | None:
    """Return the weight file named by the config, if any."""
    try:
        config = load_json(folder / "config.json")
    except (OSError, ValueError, RecursionError):
        return None  # reported where the config is read
    file_name = config.get(WEIGHTS_CONFIG_KEY) if isinstance(config, dict) else None
    return (
        file_name
        if isinstance(file_name, str) and file_name.endswith((".safetensors", ".safetensors.index.json"))
        else None
    )


_POOLER = r"(\w+\.)?pooler\.(dense\.)?(weight|bias)"
_CLASSIFIER = r"(pre_)?classifier\..+"


def is_unused_tensor(family: str, name: str, new_head: bool = False, embeds: bool = False) -> bool:
    """Return whether a model of `family` (config's model_type) does not use the tensor `name`.

    Args:
        family: the config's model_type.
        name: as in the checkpoint, also of one that was saved without its head.
        new_head: the model has another head than the checkpoint was trained with.
        embeds: it is a sentence embedder, which has no head and uses no pooler.
    """
    family_info = FAMILIES.get(family)
    patterns = (
        ()
        if family_info is None
        else family_info.unused_tensors + (family_info.other_head_tensors if new_head or embeds else ())
    )
    patterns += ((_POOLER,) if embeds else ()) + ((_CLASSIFIER,) if new_head else ())
    return any(re.fullmatch(pattern, name) for pattern in patterns)


_STRETCH = 2**22  # numbers


def require_finite_weights(folder: Path, new_head: bool = False, embeds: bool = False) -> None:
    """Require that the model in `folder` has no weight that is NaN or infinite.

    One tensor is in memory at a time. Unused tensors may have any value, and values added to logits may be
    -inf, which excludes a token.

    Args:
        folder: of the model.
        new_head: it gets another head than it was trained with, which is not read.
        embeds: it becomes a sentence embedder, which uses no head and no pooler.

    Raises:
        InputError: a weight is not finite; file and tensor are named.
    """
    invalid = list(_non_finite_tensors(folder, new_head, embeds))
    if invalid:
        path, name, counts = invalid[0]
        omitted = f", and so do {len(invalid) - 1:,} others" if len(invalid) > 1 else ""
        raise InputError(
            f"{path}: the tensor '{name}' contains {counts}{omitted}. Copy or download the model again; if"
            " training produced these values, use an earlier checkpoint.",
            code="non-finite-weights",
        )


def _non_finite_tensors(folder: Path, new_head: bool, embeds: bool) -> Iterator[tuple[Path, str, str]]:
    """Yield file and name of each non-finite tensor, and the number of NaN and infinite values."""
    import torch
    from safetensors import safe_open

    family = str(read_json_object(folder / "config.json").get("model_type"))
    added = FAMILIES[family].logits_bias if family in FAMILIES else None
    for path, name, _ in weight_tensors(folder):
        if is_unused_tensor(family, name, new_head, embeds):
            continue
        with safe_open(path, framework="pt") as file:
            tensor = file.get_tensor(name)
        if not tensor.is_floating_point():
            continue
        # in pieces, because the masks of finite numbers take more memory than the numbers
        parts = tensor.reshape(-1).split(_STRETCH)
        if all(bool(chunk.float().isfinite().all()) for chunk in parts):
            continue
        nan = sum(int(chunk.float().isnan().sum()) for chunk in parts)
        inf = torch.isposinf if name == added else torch.isinf
        infinite = sum(int(inf(chunk.float()).sum()) for chunk in parts)
        counts = [f"{nan:,} NaN"] * bool(nan) + [f"{infinite:,} inf"] * bool(infinite)
        if counts:
            yield path, name, f"{' and '.join(counts)} among {tensor.numel():,} numbers"
