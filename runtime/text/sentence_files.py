"""How a sentence embedder makes one vector of a text, as sentence-transformers stores it in a model's folder.

`modules.json` lists what is done one after another: Transformer, Pooling, maybe Normalize. The folder of
Pooling holds its kind; `sentence_bert_config.json` the most tokens of a text. Both spellings of Pooling are
read: a word (sentence-transformers 6) and flags (before). smelt writes flags, which all versions read.

Source: github.com/huggingface/sentence-transformers 6.2, base/modules and sentence_transformer/modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from smelt.core.errors import InputError
from smelt.core.files import load_json, write_json

MODULES = "modules.json"
SETTINGS = "sentence_bert_config.json"
POOLING_FOLDER = "1_Pooling"
PROMPTS = "config_sentence_transformers.json"
# what `write_sentence_rules` writes, relative to the folder
FILES = (MODULES, SETTINGS, f"{POOLING_FOLDER}/config.json")

Pooling = Literal["mean", "cls", "max"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_AGAIN = "Save the model with such a structure, or take another."


class SentenceRules(BaseModel):
    """pooling: mean over the tokens of a text, cls: its first token, max: the largest value of all tokens.

    normalize: vectors have the length 1. max_length: the most tokens of a text; None: as many as the model
    takes. lower: texts are lowercased first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    pooling: Pooling = "mean"
    normalize: bool = True
    max_length: int | None = Field(default=None, ge=1)
    lower: bool = False


def read_sentence_rules(folder: Path) -> SentenceRules | None:
    """Return how the model in `folder` makes vectors; None where it has no modules.json.

    Raises:
        InputError: a file is damaged, or asks for what smelt does not do.
    """
    path = folder / MODULES
    if not path.is_file():
        return None
    modules = _read(path, list)
    names = [_name(path, module) for module in modules]
    normalize = names[2:] == ["Normalize"]
    if names[:2] != ["Transformer", "Pooling"] or (len(names) > 2 and not normalize):
        raise InputError(
            f"{path}: the modules are {', '.join(names) or 'none'}; smelt knows Transformer, Pooling and,"
            f" where vectors are normalized, Normalize. {_AGAIN}",
            code="unsupported-modules",
        )
    if modules[0].get("path"):
        raise InputError(
            f"{path}: the Transformer lies in the folder '{modules[0]['path']}', as old versions of"
            " sentence-transformers had it. Save the model anew with a present one:"
            " SentenceTransformer(FOLDER).save(NEW).",
            code="outdated-modules",
        )
    settings = _settings(folder)
    try:
        return SentenceRules(
            pooling=_pooling(folder / str(modules[1].get("path") or "") / "config.json"),
            normalize=normalize,
            max_length=settings.get("max_seq_length"),
            lower=bool(settings.get("do_lower_case", False)),
        )
    except ValueError as error:  # pydantic's own is one
        said = settings.get("max_seq_length")
        raise InputError(
            f"{folder / SETTINGS}: max_seq_length must be a whole number above 0, read {said!r}.",
            code="wrong-value",
            setting="max_seq_length",
        ) from error


def write_sentence_rules(folder: Path, rules: SentenceRules, width: int) -> None:
    """Store `rules` in the model's `folder`; `width` is how many numbers a vector has."""
    parts = [("Transformer", ""), ("Pooling", POOLING_FOLDER)]
    parts += [("Normalize", "2_Normalize")] if rules.normalize else []
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{name}"}
        for at, (name, path) in enumerate(parts)
    ]
    flags = {flag: kind == rules.pooling for flag, kind in _FLAGS.items()}
    (folder / POOLING_FOLDER).mkdir(exist_ok=True)
    write_json(folder / MODULES, modules)
    write_json(folder / POOLING_FOLDER / "config.json", {"word_embedding_dimension": width, **flags})
    write_json(folder / SETTINGS, {"max_seq_length": rules.max_length, "do_lower_case": rules.lower})


def default_prompt(folder: Path) -> str:
    """Return what sentence-transformers puts before every text of the model in `folder`.

    Raises:
        InputError: the file that says it is damaged.
    """
    path = folder / PROMPTS
    said = _read(path, dict) if path.is_file() else {}
    prompts = said.get("prompts")
    found = prompts.get(said.get("default_prompt_name")) if isinstance(prompts, dict) else None
    return found if isinstance(found, str) else ""


def _name(path: Path, module: Any) -> str:
    if not isinstance(module, dict) or not isinstance(module.get("type"), str):
        raise InputError(
            f"{path}: expected a list of modules with a type each, read {repr(module)[:80]}.",
            code="missing-module-type",
        )
    return str(module["type"].rpartition(".")[2])


def _settings(folder: Path) -> Mapping[str, Any]:
    """Return what the Transformer's own file says; older ones are called after the family."""
    paths = [folder / SETTINGS, *sorted(folder.glob("sentence_*_config.json"))]
    found: Mapping[str, Any] = next((_read(path, dict) for path in paths if path.is_file()), {})
    return found


def _pooling(path: Path) -> Pooling:
    config = _read(path, dict)
    said = config.get("pooling_mode")
    kinds = [said] if isinstance(said, str) else list(said or ())
    kinds = kinds or [kind for flag, kind in _FLAGS.items() if config.get(flag)] or ["mean"]
    known = ", ".join(POOLINGS)
    if len(kinds) > 1:
        raise InputError(
            f"{path}: several kinds of pooling at once ({', '.join(map(str, kinds))}), whose vectors are put"
            f" one behind the other; smelt knows one of {known}. {_AGAIN}",
            code="several-poolings",
        )
    if config.get("include_prompt") is False:
        raise InputError(
            f"{path}: include_prompt: false, pooling without the prompt, is not supported.",
            code="unsupported-prompt-pooling",
        )
    for kind in POOLINGS:
        if kind == kinds[0]:
            return kind
    raise InputError(
        f"{path}: pooling '{kinds[0]}' is not supported; smelt knows {known}. {_AGAIN}",
        code="unsupported-pooling",
    )


def _read(path: Path, kind: type) -> Any:
    try:
        value = load_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {error}", code="damaged-file") from error
    if not isinstance(value, kind):
        what = "a list" if kind is list else "an object"
        raise InputError(f"{path}: expected {what} of JSON, read {repr(value)[:80]}.", code="wrong-json-type")
    return value
