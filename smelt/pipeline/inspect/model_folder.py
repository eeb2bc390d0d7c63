"""Check without torch, from config, JSON and headers, that a folder is a supported model, quantized or not.

Only safetensors weights are read. Pickle files (`pytorch_model.bin`, `.pt`, `.ckpt`) can run arbitrary code
when they are opened, so they are always rejected.

The files must belong together. Checked are the byte range of each tensor in its safetensors file, the
embedding's shape against the config, and the tokenizer's tokens against the embedding's rows. All other
shapes are checked when the model is loaded, before the first stage.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import load_json, path_exists
from smelt.core.messages import Message, error_message, warning, with_article
from smelt.data.labels import has_classifier
from smelt.data.tasks import Task, task_traits, tasks_with
from smelt.models.families.registry import (
    FAMILIES,
    FAMILIES_BY_TASK,
    find_family,
    is_token_embedding,
    lacks_head,
)
from smelt.models.quantization_config import (
    QUANTIZATION_CONFIG_KEY,
    new_head_message,
    parse_quantization_config,
    require_quantized_tensors,
    undeclared_quantized_layer,
)
from smelt.models.weight_files import (
    WEIGHTS_FILE,
    WEIGHTS_INDEX_FILE,
    find_weights,
    has_weights,
    oversized_setting,
    read_header,
    weight_tensors,
)

# https://github.com/huggingface/safetensors, "Format"; sub-byte types are counted in bits.
_DTYPE_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6}
_DTYPE_BITS |= {"F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32}
_DTYPE_BITS |= {"C64": 64, "F64": 64, "I64": 64, "U64": 64}


def damaged_tensor_problem(header: Mapping[str, Any]) -> str | None:
    """Return a message about the first safetensors entry whose byte range does not fit its shape, or None."""
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape, (start, end) = entry["shape"], entry["data_offsets"]
        is_valid = all(
            isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (*shape, start, end)
        )
        bits = _DTYPE_BITS.get(entry["dtype"])
        if not is_valid or (bits is not None and math.prod(shape) * bits != 8 * (end - start)):
            return (
                f"the tensor '{str(name)[:80]}' is declared as {entry['dtype']} {str(shape)[:60]} in the"
                f" bytes {start} to {end}"
            )
    return None


def check_file_consistency(folder: Path, config: Mapping[str, Any]) -> tuple[list[Message], list[Message]]:
    """Compare tokenizer, config and embedding of the model in `folder`.

    Returns:
        Errors and warnings.
    """
    if json_errors := _broken_json(folder):
        return json_errors, []
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int) or isinstance(vocab_size, bool):
        return [], []
    problems = _check_embedding(folder, config, vocab_size)
    try:
        token_info = _token_count_and_max_id(folder, str(config.get("model_type")))
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        text = f"{folder}: cannot read the tokenizer's files: {error}"
        return [*problems, error_message("damaged-tokenizer", text)], []
    if token_info is None:
        return problems, []
    count, highest = token_info
    if highest >= vocab_size:
        problems.append(
            error_message(
                "tokenizer-mismatch",
                f"{folder}: the tokenizer does not fit this model: its token ids go up to {highest},"
                f" but the embedding has {vocab_size} rows (vocab_size). Copy this model's tokenizer there.",
            )
        )
    if not problems and count < vocab_size // 2:
        return [], [
            warning(
                "tokenizer-much-smaller",
                f"The tokenizer has only {count} tokens for {vocab_size} rows of the embedding. Check that it"
                " belongs to this model.",
            )
        ]
    return problems, []


def _broken_json(folder: Path) -> list[Message]:
    """Return errors for JSON files of the model that are not valid JSON objects."""
    errors = []
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            try:
                _read_json(folder / name)
            except (OSError, ValueError, RecursionError) as error:
                text = f"{folder / name}: cannot be read: {str(error).removeprefix(f'{name}: ')}"
                errors.append(error_message("invalid-json", text))
    return errors


def _check_embedding(folder: Path, config: Mapping[str, Any], rows: int) -> list[Message]:
    """Compare the embedding's shape with the config; return errors."""
    family = find_family(config)
    if family is None:
        return []
    width = family.embedding_size(config)
    if not any(stack.stream.embedding_projection for stack in family.stacks(config)):
        width = _pruned_width(folder) or width
    for path, name, entry in weight_tensors(folder):
        shape = entry["shape"]
        if not is_token_embedding(family, config, name) or len(shape) != 2:
            continue
        if shape[0] != rows or width not in (None, shape[1]):
            expected = [rows, shape[1] if width is None else width]
            return [
                error_message(
                    "shape-mismatch",
                    f"{path}: the tensor '{name}' has shape {shape}, but config.json requires {expected}"
                    " (vocab_size, width). Use the config that belongs to these weights.",
                )
            ]
    return []


def _pruned_width(folder: Path) -> int | None:
    """Return the number of channels after `prune` from structure.json, where the config is not updated."""
    try:
        edits = _read_json(folder / "structure.json").get("edits")
    except (OSError, ValueError, RecursionError):
        return None  # not an artifact; an invalid file is reported when the model is loaded
    edits = edits if isinstance(edits, list) else []
    kept_channels = [
        edit.get("keep") for edit in edits if isinstance(edit, dict) and edit.get("op") == "width"
    ]
    return len(kept_channels[-1]) if kept_channels and isinstance(kept_channels[-1], list) else None


def _token_count_and_max_id(folder: Path, kind: str) -> tuple[int, int] | None:
    """Return the tokenizer's number of tokens and highest id; None if its files do not contain them."""
    ids = [token_id for _, token_id in _read_tokens(folder, kind)]
    if not all(isinstance(number, int) for number in ids):
        raise ValueError("a token id is not an integer")
    return (len(set(ids)), max(ids)) if ids else None


def different_token(folder: Path, other: Path) -> tuple[str, int, int] | None:
    """Return a token of both models with its ids in `folder` and `other`, if these differ in one; else None.

    Tokenizers whose files contain no ids, or that cannot be read, are not compared.
    """
    first, second = ({}, {}) if folder == other else (_ids_by_token(path) for path in (folder, other))
    for token, token_id in first.items():
        if token in second and second[token] != token_id:
            return token, token_id, second[token]
    return None


def _ids_by_token(folder: Path) -> dict[Any, Any]:
    try:
        config = _read_json(folder / "config.json")
        return dict(_read_tokens(folder, str(config.get("model_type"))))
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):  # reported elsewhere
        return {}


def _read_tokens(folder: Path, kind: str) -> list[tuple[Any, Any]]:
    """Return the tokens with their ids, as the files contain them; empty if they do not."""
    fast_file = folder / "tokenizer.json"
    family = FAMILIES.get(kind)
    if (family is None or family.tokenizer_files.accepts_fast) and fast_file.is_file():
        content = _read_json(fast_file)
        vocabulary = (content.get("model") or {}).get("vocab") or {}
        # in a unigram model the ids are the indices of the pieces
        tokens = (
            list(vocabulary.items())
            if isinstance(vocabulary, dict)
            else [(piece, token_id) for token_id, (piece, _) in enumerate(vocabulary)]
        )
        return tokens + [(token.get("content"), token["id"]) for token in content.get("added_tokens") or []]
    if (folder / "vocab.json").is_file():
        files = [path for name in ("vocab.json", "added_tokens.json") if (path := folder / name).is_file()]
        return [item for path in files for item in _read_json(path).items()]
    if (folder / "vocab.txt").is_file():
        lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
        return [(token, token_id) for token_id, token in enumerate(lines)]
    return []


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = load_json(path)
    except ValueError as error:
        raise ValueError(f"{path.name}: invalid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name}: expected a JSON object")
    return value


def quantization_problems(
    folder: Path, config: Mapping[str, Any], task: Task | None, has_headers: bool
) -> list[Message]:
    """Return errors if the quantized weights declared in the config are not supported.

    Checks that need the values (order of inputs, zero points of 16, scales outside the range of float16,
    sizes in the config) are made during the run.

    Args:
        folder: the model's folder.
        config: its Hugging Face config; empty if missing.
        task: task of the model; None if unknown.
        has_headers: whether the headers of the weights can be read.
    """
    try:
        quantization = parse_quantization_config(config)
    except InputError as error:
        return [error.as_message().with_prefix(f"{folder / 'config.json'}: ")]
    try:
        if quantization is None:
            return _undeclared_quantization(folder) if has_headers else []
        if has_headers:
            require_quantized_tensors(folder, quantization)
    except InputError as error:
        return [error.as_message()]
    wants_head = lacks_head(config) or (
        task in tasks_with(classifies=True) and not has_classifier(config, task)
    )
    return (
        [error_message("head-on-quantized", f"{folder}: {new_head_message(quantization)}")]
        if wants_head
        else []
    )


def _undeclared_quantization(folder: Path) -> list[Message]:
    """Return an error if there are quantized weights that the config does not declare."""
    layer = undeclared_quantized_layer(folder)
    if layer is None:
        return []
    return [
        error_message(
            "missing-quantization-config",
            f"{folder}: '{layer}.qweight' and other tensors are quantized, but config.json has no"
            f" {QUANTIZATION_CONFIG_KEY}. Older tools wrote it to a separate file (quantize_config.json,"
            f" quant_config.json): copy its content to config.json as {QUANTIZATION_CONFIG_KEY}, with"
            " quant_method: gptq or awq.",
        )
    ]


_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_CONVERT_HINT = (
    "If you trust their source, convert them with "
    "AutoModel.from_pretrained(FOLDER).save_pretrained(NEW, safe_serialization=True), with the Auto class"
    " of the task, and copy the tokenizer's files."
)


def check_model_folder(
    folder: Path, task: Task | None, is_baseline: bool = True, needs_tokenizer: bool = True
) -> tuple[list[Message], list[Message]]:
    """Check the files of `folder`: config, weights, tokenizer.

    Args:
        folder: the model's folder.
        task: task of the model; None if unknown.
        is_baseline: whether the original model is the baseline of the run.
        needs_tokenizer: whether its tokenizer or image processor is used.

    Returns:
        Errors and warnings.
    """
    if not folder.is_dir():
        names = [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() else []
        suggestion = did_you_mean(folder.name, names)
        code, kind = (
            ("not-a-folder", "not a folder") if folder.exists() else ("missing-folder", "no such folder")
        )
        text = f"{folder}: {kind}. Expected a model's folder with config.json, or a hub id.{suggestion}"
        return [error_message(code, text)], []
    config, problems = read_config(folder)
    weight_errors = _check_weights(folder)
    problems += [*weight_errors, *quantization_problems(folder, config, task, has_headers=not weight_errors)]
    kind = str(config.get("model_type", ""))
    families = FAMILIES_BY_TASK.get(task, ()) if task else ()
    if config and families and not _supports_task(config, task):
        problems.append(unknown_family_message(kind, task).with_prefix(f"{folder / 'config.json'}: "))
    else:
        problems += (
            _check_language_model(config, folder) if task in tasks_with(architecture="decoder") else []
        )
        problems += _check_head(config, folder, task) if task in tasks_with(architecture="encoder") else []
        problems += [
            problem.with_prefix(f"{folder / 'config.json'}: ")
            for problem in unsupported_config_errors(config)
        ]
    problems += check_tokenizer_files(folder, kind) if needs_tokenizer else []
    if problems:
        return problems, []
    if (config_problem := oversized_setting(folder, config)) is not None:
        return [error_message("config-exceeds-weights", config_problem)], []
    problems, advice = check_file_consistency(folder, config)
    return problems, [
        *advice,
        *_duplicate_weights_warning(folder),
        *_config_warnings(config, task, is_baseline),
    ] if not problems else []


def _supports_task(config: Mapping[str, Any], task: Task | None) -> bool:
    family = find_family(config)
    return family is not None and task in family.tasks


def unknown_family_message(kind: str, task: Task | None = None) -> Message:
    """Return the error that the model_type `kind` is not supported for `task` (None: for any task).

    No similar name is suggested: model_type is written by programs, and similar names are other
    architectures.
    """
    if (family := find_family({"model_type": kind})) and family.is_user_module:
        text = "an artifact of your own PyTorch module. Use its recipe, or `smelt init --module NAME`"
        return error_message("user-module", f"{text} (docs/how-to/pytorch-modules.md).")
    tasks = [name for name, families in FAMILIES_BY_TASK.items() if kind in families]
    if tasks and task:
        return error_message(
            "unsupported-task",
            f"{with_article(kind)} model is not supported for {task} by this version, only for"
            f" {' or '.join(tasks)}. Supported for {task}: {', '.join(FAMILIES_BY_TASK[task])}.",
        )
    supported = {task: FAMILIES_BY_TASK[task]} if task else FAMILIES_BY_TASK
    supported_text = "; ".join(f"for {name} {', '.join(families)}" for name, families in supported.items())
    return error_message(
        "unsupported-family",
        f"model_type '{kind}' is not supported by this version. Supported: {supported_text}.",
    )


def _check_language_model(config: dict[str, Any], folder: Path) -> list[Message]:
    """Return an error if the config is not of a causal language model."""
    classes: list[str] = config.get("architectures") or []
    if not config or any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in classes):
        return []
    return [
        error_message(
            "unsupported-architecture",
            f"{folder / 'config.json'}: 'architectures' is {classes}; expected a language model, whose class"
            " ends in ForCausalLM or LMHeadModel.",
        )
    ]


def _check_head(config: dict[str, Any], folder: Path, task: Task) -> list[Message]:
    """Return an error if the config is not of the encoders of `task`; only classifiers get a new head."""
    traits, classes = task_traits(task), config.get("architectures") or []
    head = str(traits.auto_class).removeprefix("AutoModel")
    if traits.classifies:
        return []
    if head and not any(name.endswith(head) for name in classes):
        problem = f"not ...{head}. Start from a model that is trained for {task}."
    elif not head and any(name.endswith("Classification") for name in classes):
        problem = (
            "a classifier, not a sentence embedder. Save only its encoder,"
            " AutoModel.from_pretrained(FOLDER).save_pretrained(NEW), and copy the tokenizer."
        )
    else:
        return []
    text = f"{folder / 'config.json'}: 'architectures' is {classes}, {problem}"
    return [error_message("unsupported-architecture", text)]


def unsupported_config_errors(config: dict[str, Any]) -> list[Message]:
    """Return errors for settings of a config that its family does not support."""
    family = find_family(config)
    return [
        error_message("unsupported-config", text)
        for text in (family.unsupported_config(config) if family else ())
    ]


def read_config(folder: Path) -> tuple[dict[str, Any], list[Message]]:
    """Return the Hugging Face config in `folder` (empty if missing), and errors in it."""
    path = folder / "config.json"
    if not path.is_file():
        text = f"{folder}: no config.json in this folder. Expected a model's folder."
        return {}, [error_message("missing-config", text)]
    return read_config_file(path)


def read_config_file(path: Path) -> tuple[dict[str, Any], list[Message]]:
    """Return the Hugging Face config in the file `path` (empty if missing), and errors in it."""
    if not (path_exists(path) and path.is_file()):
        folder_exists = path_exists(path.parent) and path.parent.is_dir()
        suggestion = did_you_mean(path.name, [p.name for p in path.parent.iterdir()]) if folder_exists else ""
        return {}, [
            error_message("missing-config", f"{path}: no such file. Expected a model's config.{suggestion}")
        ]
    try:
        config = load_json(path)
    except (OSError, ValueError, RecursionError) as error:
        return {}, [error_message("invalid-json", f"{path}: invalid JSON: {error}")]
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        text = f"{path}: expected a JSON object with a model_type, as transformers writes it."
        return {}, [error_message("invalid-config", text)]
    classes = config.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        text = f"{path}: 'architectures' must be a list of class names, as transformers writes it."
        return {}, [error_message("invalid-config", text)]
    return config, []


def _check_weights(folder: Path) -> list[Message]:
    pickles = sorted(path.name for pattern in _PICKLE_PATTERNS for path in folder.glob(pattern))
    if pickles and not has_weights(folder):
        return [
            error_message(
                "pickled-weights",
                f"{folder}: the weights are pickle files ({', '.join(pickles[:3])}), which can run arbitrary"
                f" code when opened, so smelt does not read them. {_CONVERT_HINT}",
            )
        ]
    try:
        weights = find_weights(folder)
        problems = [problem for path in weights.files for problem in _check_header(path)]
        if not problems:
            for path in weights.files:
                weights.require_complete(path, read_header(path))
    except InputError as error:
        graphs = sorted(path.name for path in folder.glob("*.onnx"))
        graphs_hint = (
            f" Its ONNX files ({', '.join(graphs[:3])}) have no weights for torch." if graphs else ""
        )
        return [error_message(error.code or "damaged-weights", f"{error}{graphs_hint}")]
    return problems


def _duplicate_weights_warning(folder: Path) -> list[Message]:
    """Return a warning if a folder has weights twice, such as an old single file next to new shards."""
    if not ((folder / WEIGHTS_FILE).is_file() and (folder / WEIGHTS_INDEX_FILE).is_file()):
        return []
    used_files = {path.name for path in find_weights(folder).files}
    ignored_file = WEIGHTS_INDEX_FILE if WEIGHTS_FILE in used_files else WEIGHTS_FILE
    return [
        warning(
            "weights-stored-twice",
            f"{folder} contains weights in {WEIGHTS_FILE} and in shards. {ignored_file} is ignored, as in"
            " transformers; remove the outdated one.",
        )
    ]


def _check_header(path: Path) -> list[Message]:
    """Check the header of a safetensors file, and that the file has the length that the header requires.

    Format: 8 bytes little-endian length, JSON of that length, then the tensors
    (https://github.com/huggingface/safetensors, "Format").
    """
    remedy = "Copy or download it again."
    if not path.is_file():
        return [error_message("missing-file", f"{path}: missing file of the weights. {remedy}")]
    size = path.stat().st_size
    code, problem = "damaged-weights", ""
    try:
        with path.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            header = json.loads(stream.read(length)) if 8 + length <= size else None
        if start == b"version ":
            text = f"{path}: a Git LFS pointer, not the weights. Fetch them with `git lfs pull`."
            return [error_message("lfs-pointer", text)]
        tensors = [v["data_offsets"][1] for k, v in (header or {}).items() if k != "__metadata__"]
        expected = 8 + length + max(tensors)
        if size < expected:
            code, problem = "truncated-file", f"incomplete file: {size:,} of {expected:,} bytes. {remedy}"
        elif damage := damaged_tensor_problem(header or {}):
            code, problem = "damaged-header", f"damaged header: {damage}. {remedy}"
    except OSError as error:
        code, problem = "unreadable-file", f"cannot read the file: {error.strerror}."
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        problem = f"not a safetensors file, or incomplete ({size:,} bytes). {remedy}"
    return [error_message(code, f"{path}: {problem}")] if problem else []


def check_tokenizer_files(folder: Path, kind: str) -> list[Message]:
    """Return errors for missing tokenizer files in `folder` for a model of the family `kind`.

    For an image model, errors in its image processor.
    """
    fix = "Copy the tokenizer's files there (tokenizer.save_pretrained(FOLDER))."
    family = FAMILIES.get(kind)
    if family is None:  # unsupported, which is reported elsewhere
        return []
    if family.input_kind == "images":
        return _check_image_processor(folder)
    slow_files = family.tokenizer_files.slow_files
    missing = [name for name in slow_files if not (folder / name).is_file()]
    if not family.tokenizer_files.accepts_fast:
        text = f"{folder}: incomplete tokenizer: {', '.join(missing)} missing. {fix}"
        return [error_message("missing-tokenizer", text)] if missing else []
    if any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt")) or (
        slow_files and not missing
    ):
        return []
    byte_class, config_file = family.tokenizer_files.byte_class, folder / "tokenizer_config.json"
    if byte_class and config_file.is_file() and _read_json(config_file).get("tokenizer_class") == byte_class:
        return []
    expected = f"tokenizer.json or {' and '.join(slow_files) or 'vocab.txt'}"
    return [error_message("missing-tokenizer", f"{folder}: no tokenizer. Expected {expected}. {fix}")]


def _check_image_processor(folder: Path) -> list[Message]:
    """Return errors in the image processor in `folder`."""
    from smelt.runtimes.images import read_processor

    try:
        read_processor(folder)
    except InputError as error:
        return [error.as_message()]
    return []


def _config_warnings(config: dict[str, Any], task: Task | None, is_baseline: bool) -> list[Message]:
    classes: list[str] = config.get("architectures") or []
    if task in tasks_with(classifies=True) and classes and not has_classifier(config, task):
        advice = ". Start with a finetune step and set it as the baseline" if is_baseline else ""
        return [
            warning(
                "new-classifier",
                f"The model ({classes[0]}) has no head for {task}; a random one is added{advice}.",
            )
        ]
    return []
