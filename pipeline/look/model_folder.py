"""Is this folder a model that smelt can start from? Asked before torch is imported.

Only safetensors weights are read. Pickle files (`pytorch_model.bin`, `.pt`, `.ckpt`) can run any code
when they are opened, so they are refused, whatever they hold.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from smelt.core.data import CLASSIFICATION, SIMILARITY, Task
from smelt.core.errors import InputError, nearest, together
from smelt.core.files import is_there, load_json, placed
from smelt.core.hub import cache_alone, hub_lacks
from smelt.core.labels import CLASSIFIERS
from smelt.core.messages import Message, mistake, warning
from smelt.core.text import article
from smelt.families.registry import BY_TASK, FAMILIES, find_family
from smelt.look.codes import codes_problems
from smelt.look.model_files import damaged_tensor, misfits
from smelt.runtime.models.weight_files import (
    INDEX,
    WEIGHTS,
    find_weights,
    has_weights,
    oversized,
    read_header,
)

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# What is fetched from the hub: no pickles, no weights of other frameworks, no code.
_HUB_FILES = ["*.json", "*.safetensors", "*.spm", "*.model", "*.txt", "README.md", "LICENSE*"]
_CONVERT = (
    "Convert them in a place that you trust: "
    "AutoModel.from_pretrained(FOLDER).save_pretrained(NEW, safe_serialization=True), with the Auto class"
    " of the task, and copy the tokenizer's files."
)


def local_folder(model: str, base: Path) -> Path | None:
    """Return the folder that `model` means, relative to `base`, or None for an id on the hub."""
    path = placed(base, model)
    if path.exists() or not _HUB_ID.fullmatch(model) or path.parent.is_dir():
        return path
    return None


def fetch_model(model: str, base: Path, task: Task) -> Path:
    """Return the folder of `model`; an id on the hub is downloaded (safetensors and texts only).

    Raises:
        InputError: it cannot be had, or is not a model that smelt can start from.
    """
    folder = local_folder(model, base)
    if folder is None:
        import huggingface_hub

        lack = hub_lacks()
        try:
            with cache_alone(lack):
                folder = Path(huggingface_hub.snapshot_download(model, allow_patterns=_HUB_FILES))
        except Exception as error:  # the hub client raises many kinds; all mean: not to be had
            raise not_given(model, lack, error) from error
    problems, _ = check_model_folder(folder, task)
    if problems:
        raise together(problems)
    return folder


def not_given(model: str, lack: str | None, error: Exception) -> InputError:
    """Return what to tell of an id that the hub did not give; `lack`: why it was not asked."""
    if lack is None:
        return InputError(
            f"{model}: no such folder, and the hub does not give a model of that name: {error}",
            code="not-on-hub",
        )
    return InputError(
        f"{model}: no such folder, and not in the cache of the hub's files on this machine; {lack}."
        " Give a model's folder, or fetch it with a network first.",
        code="not-in-hub-cache",
    )


def check_model_folder(
    folder: Path, task: Task | None, is_baseline: bool = True, texts: bool = True
) -> tuple[list[Message], list[Message]]:
    """Look at the files of `folder`: config, weights, tokenizer.

    Args:
        folder: the model's folder.
        task: what the model is for; None where that is not known.
        is_baseline: whether the steps are compared with the model as it is.
        texts: whether its tokenizer, or processor of images, is read.

    Returns:
        What makes it unusable, and what the user should be warned of.
    """
    if not folder.is_dir():
        beside = [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() else []
        near = nearest(folder.name, beside)
        code, kind = (
            ("not-a-folder", "not a folder") if folder.exists() else ("missing-folder", "no such folder")
        )
        text = f"{folder}: {kind}; expected a model's folder with config.json, or a hub id.{near}"
        return [mistake(code, text)], []
    config, problems = read_config(folder)
    broken = _weights(folder)
    problems += [*broken, *codes_problems(folder, config, task, whole=not broken)]
    kind = str(config.get("model_type", ""))
    families = BY_TASK[task] if task else ()
    if config and families and kind not in families:
        problems.append(unknown_family(kind, task).prefixed(f"{folder / 'config.json'}: "))
    else:
        problems += _no_language_model(config, folder) if task == "language-modeling" else []
        problems += _no_encoder(config, folder) if task == SIMILARITY else []
        problems += [problem.prefixed(f"{folder / 'config.json'}: ") for problem in refused(config)]
    problems += check_tokenizer(folder, kind) if texts else []
    if problems:
        return problems, []
    if (wrong := oversized(folder, config)) is not None:
        return [mistake("config-exceeds-weights", wrong)], []
    problems, advice = misfits(folder, config)
    return problems, [
        *advice,
        *_two_models(folder),
        *_warnings(config, task, is_baseline),
    ] if not problems else []


def unknown_family(kind: str, task: Task | None = None) -> Message:
    """Return that models with the model_type `kind` are not for `task` (None: any task), and which are.

    No family is proposed instead: a program wrote the word, and one letter makes another architecture.
    """
    tasks = [name for name, families in BY_TASK.items() if kind in families]
    if tasks and task:
        return mistake(
            "unsupported-task",
            f"{article(kind)} model is not supported for {task} by this version; it is for"
            f" {' or '.join(tasks)}. Supported for {task}: {', '.join(BY_TASK[task])}.",
        )
    known = {task: BY_TASK[task]} if task else BY_TASK
    words = "; ".join(f"for {name} {', '.join(families)}" for name, families in known.items())
    return mistake(
        "unsupported-family",
        f"model_type '{kind}' is no family of models that this version knows. It knows {words}.",
    )


def _no_language_model(config: dict[str, Any], folder: Path) -> list[Message]:
    """Say why the model of a config is no language model, if it is none."""
    named: list[str] = config.get("architectures") or []
    if not config or any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in named):
        return []
    return [
        mistake(
            "unsupported-architecture",
            f"{folder / 'config.json'}: 'architectures' is {named}; a language model ends in ForCausalLM or"
            " LMHeadModel.",
        )
    ]


def _no_encoder(config: dict[str, Any], folder: Path) -> list[Message]:
    """Say that the model of a config is a classifier, whose head no vector would show."""
    named: list[str] = config.get("architectures") or []
    if not any(name.endswith("Classification") for name in named):
        return []
    return [
        mistake(
            "unsupported-architecture",
            f"{folder / 'config.json'}: 'architectures' is {named}: a classifier makes no vectors. Save its"
            " encoder alone, AutoModel.from_pretrained(FOLDER).save_pretrained(NEW), and copy the tokenizer.",
        )
    ]


def refused(config: dict[str, Any]) -> list[Message]:
    """Return what of a config smelt cannot follow, as its family knows."""
    family = find_family(config)
    return [mistake("unsupported-config", text) for text in (family.refuses(config) if family else ())]


def read_config(folder: Path) -> tuple[dict[str, Any], list[Message]]:
    """Return the Hugging Face config in `folder`, empty where there is none, and what is wrong with it."""
    path = folder / "config.json"
    if not path.is_file():
        text = f"{folder}: no config.json in this folder, so it is not a model's folder."
        return {}, [mistake("missing-config", text)]
    return read_config_file(path)


def read_config_file(path: Path) -> tuple[dict[str, Any], list[Message]]:
    """Return the Hugging Face config in the file `path` (empty for none), and what is wrong with it."""
    if not (is_there(path) and path.is_file()):
        beside = is_there(path.parent) and path.parent.is_dir()
        near = nearest(path.name, [p.name for p in path.parent.iterdir()]) if beside else ""
        return {}, [mistake("missing-config", f"{path}: no such file; expected a model's config.{near}")]
    try:
        config = load_json(path)
    except (OSError, ValueError, RecursionError) as error:
        return {}, [mistake("invalid-json", f"{path}: broken JSON: {error}")]
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        text = f"{path}: expected a JSON object with a model_type, as transformers writes it."
        return {}, [mistake("invalid-config", text)]
    classes = config.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        text = f"{path}: 'architectures' must be a list of names of classes, as transformers writes it."
        return {}, [mistake("invalid-config", text)]
    return config, []


def _weights(folder: Path) -> list[Message]:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles and not has_weights(folder):
        return [
            mistake(
                "pickled-weights",
                f"{folder}: the weights are pickle files ({', '.join(pickles[:3])}), which can run any code"
                f" when they are opened, so smelt never reads them. {_CONVERT}",
            )
        ]
    try:
        weights = find_weights(folder)
        problems = [problem for path in weights.files for problem in _header(path)]
        if not problems:
            for path in weights.files:
                weights.require(path, read_header(path))
    except InputError as error:
        graphs = sorted(path.name for path in folder.glob("*.onnx"))
        what = f" It has graphs ({', '.join(graphs[:3])}), which have no weights for torch." if graphs else ""
        return [mistake(error.code or "damaged-weights", f"{error}{what}")]
    return problems


def _two_models(folder: Path) -> list[Message]:
    """Say which weights are taken where a folder holds them twice: saving in shards leaves the old file."""
    if not ((folder / WEIGHTS).is_file() and (folder / INDEX).is_file()):
        return []
    taken = {path.name for path in find_weights(folder).files}
    other = INDEX if WEIGHTS in taken else WEIGHTS
    return [
        warning(
            "weights-stored-twice",
            f"{folder} holds weights in {WEIGHTS} and in shards; {other} is ignored, as in transformers.",
        )
    ]


def _header(path: Path) -> list[Message]:
    """Check the header of a safetensors file and that the file is as long as the header says.

    Format: 8 bytes little-endian length, JSON of that length, then the tensors
    (https://github.com/huggingface/safetensors, "Format").
    """
    again = "Copy or download it again."
    if not path.is_file():
        return [mistake("missing-file", f"{path}: this file of the weights is missing.")]
    size = path.stat().st_size
    code, problem = "damaged-weights", ""
    try:
        with path.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            header = json.loads(stream.read(length)) if 8 + length <= size else None
        if start == b"version ":
            text = f"{path}: a Git LFS pointer, not the weights. Fetch them with `git lfs pull`."
            return [mistake("lfs-pointer", text)]
        tensors = [v["data_offsets"][1] for k, v in (header or {}).items() if k != "__metadata__"]
        expected = 8 + length + max(tensors)
        if size < expected:
            code, problem = "truncated-file", f"cut short: {size:,} of {expected:,} bytes. {again}"
        elif damage := damaged_tensor(header or {}):
            code, problem = "damaged-header", f"a damaged header: {damage}. {again}"
    except OSError as error:
        code, problem = "unreadable-file", f"cannot be read: {error.strerror}."
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        problem = f"not a safetensors file, or cut short ({size:,} bytes). {again}"
    return [mistake(code, f"{path}: {problem}")] if problem else []


def check_tokenizer(folder: Path, kind: str) -> list[Message]:
    """Return what the tokenizer's files in `folder` lack for a model of the family `kind`.

    Of a model of images: what is wrong with its image processor.
    """
    fix = "Copy the tokenizer's files there (tokenizer.save_pretrained(FOLDER))."
    family = FAMILIES.get(kind)
    if family is None:  # that it is not supported is said elsewhere; its tokenizer is unknown here
        return []
    if family.reads == "images":
        return _processor(folder)
    slow = family.tokenizer.slow
    missing = [name for name in slow if not (folder / name).is_file()]
    if not family.tokenizer.fast:
        text = f"{folder}: no tokenizer: {', '.join(missing)} missing. {fix}"
        return [mistake("missing-tokenizer", text)] if missing else []
    if any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt")) or (slow and not missing):
        return []
    expected = f"tokenizer.json or {' and '.join(slow) or 'vocab.txt'}"
    return [mistake("missing-tokenizer", f"{folder}: no tokenizer; expected {expected}. {fix}")]


def _processor(folder: Path) -> list[Message]:
    """Return what is wrong with the image processor in `folder`."""
    from smelt.runtime.images.processor import read_processor

    try:
        read_processor(folder)
    except InputError as error:
        return [error.as_message()]
    return []


def _warnings(config: dict[str, Any], task: Task | None, is_baseline: bool) -> list[Message]:
    named: list[str] = config.get("architectures") or []
    if task in CLASSIFICATION and named and not any(n.endswith(CLASSIFIERS) for n in named):
        advice = "; begin with a finetune step and take that as the baseline" if is_baseline else ""
        return [
            warning(
                "new-classifier",
                f"The model ({named[0]}) has no classification head; a random one is added{advice}.",
            )
        ]
    return []
