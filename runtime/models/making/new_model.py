"""A model with random weights, from its config and a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from smelt.core.data import IMAGES, TEXT_TO_TEXT, Task
from smelt.core.errors import InputError
from smelt.core.labels import ProblemType
from smelt.core.messages import Message, warning
from smelt.core.text import article
from smelt.families.registry import FAMILIES, family_of
from smelt.runtime.generate.shortlist import FILE as SHORTLIST
from smelt.runtime.models.checkpoint import load_tokenizer, save_model
from smelt.runtime.models.import_model import make_embedder
from smelt.runtime.models.sentence_model import sentence_class
from smelt.runtime.text.sentence_files import SentenceRules

_NOT_SETTINGS = frozenset({"model_type", "architectures", "transformers_version"})


def make_model(
    values: Mapping[str, Any],
    tokenizer_folder: Path,
    out: Path,
    *,
    task: Task,
    seed: int,
    exact: bool = False,
    labels: Sequence[str] = (),
    problem: ProblemType | None = None,
    sentences: SentenceRules | None = None,
) -> list[Message]:
    """Write a model with the weights that its class draws with `seed` into `out`, and its tokenizer.

    A model of images has an image processor in its place. Vocabulary and special tokens in the config become
    the tokenizer's.

    Args:
        values: a Hugging Face config.
        tokenizer_folder: where the tokenizer (or preprocessor_config.json) lies.
        out: gets a whole model folder.
        task: what the model is for; chooses its class.
        seed: of the weights.
        exact: the vocabulary is to be as large as the tokenizer, also where the config has it larger.
        labels: names of a classifier's outputs.
        problem: kind of classification.
        sentences: how a sentence embedder makes vectors.

    Returns:
        What was changed in the config, for the user.

    Raises:
        InputError: transformers cannot make a model of this config, or the tokenizer lacks a token that
            the model needs.
    """
    agreed = {} if task == IMAGES else agreement(values, load_tokenizer(tokenizer_folder), task, exact)
    settings = {k: v for k, v in values.items() if k not in _NOT_SETTINGS} | agreed
    if labels:
        settings["id2label"] = dict(enumerate(labels))
        settings["label2id"] = {name: i for i, name in enumerate(labels)}
        settings["problem_type"] = problem
    kind = str(values["model_type"])
    torch.manual_seed(seed)  # transformers' set_seed imports its trainer, and peft and bitsandbytes with it
    try:
        config = transformers.AutoConfig.for_model(kind, **settings)
        if sentences is None:
            model = _class_for(task).from_config(config, dtype=torch.float32, trust_remote_code=False)
        else:
            model = sentence_class(config, sentences)(config)
    except Exception as error:  # configs and models check their values with errors of many kinds
        raise InputError(
            f"model.config: transformers cannot make a model of it: {error}",
            code="wrong-config",
            setting="model.config",
        ) from error
    for name, value in agreed.items():
        if model.can_generate() and hasattr(model.generation_config, name):
            setattr(model.generation_config, name, value)
    family = family_of(model)
    if family is not None and family.bars_pad:
        model.generation_config.bad_words_ids = [[config.pad_token_id]]  # as its checkpoints do
    model.eval()
    save_model(model, [], out, tokenizer_folder, "fp32")
    (out / SHORTLIST).unlink(missing_ok=True)  # was learned for the model that the tokenizer came with
    if sentences is not None:
        make_embedder(out, sentences)
    return [
        warning("config-changed", f"{name} is {value}, as in the tokenizer; the config said {values[name]}.")
        for name, value in agreed.items()
        if values.get(name) not in (None, value)
    ]


def agreement(values: Mapping[str, Any], tokenizer: Any, task: Task, exact: bool) -> dict[str, Any]:
    """Return the vocabulary and the special tokens that a config must have to fit `tokenizer`.

    A vocabulary that is said to be larger than the tokenizer's stays, unless it is to be `exact`: some
    are padded to a round number.

    Raises:
        InputError: the tokenizer has no token that the model needs.
    """
    kind, size = str(values["model_type"]), len(tokenizer)
    said = values.get("vocab_size")
    wanted: dict[str, Any] = {"vocab_size": size if exact or not said else max(size, int(said))}
    if values.get("decoder_vocab_size"):
        wanted["decoder_vocab_size"] = wanted["vocab_size"]
    for role in ("pad", "eos", "bos"):
        token = getattr(tokenizer, f"{role}_token_id", None)
        if token is None and _needs(role, task):
            raise InputError(
                f"model.tokenizer: it has no {role} token, which {article(kind)} model for {task} needs. Add"
                f" one: tokenizer.{role}_token = ...; tokenizer.save_pretrained(FOLDER).",
                code="missing-special-token",
                setting="model.tokenizer",
            )
        wanted[f"{role}_token_id"] = token
    if task in TEXT_TO_TEXT:
        family = FAMILIES[kind]
        wanted["decoder_start_token_id"] = wanted[f"{family.starts_with}_token_id"]
        if family.forces_end:
            wanted["forced_eos_token_id"] = wanted["eos_token_id"]
    return wanted


def _needs(role: str, task: Task) -> bool:
    """Say whether a model for `task` cannot do without the token: text that is made has to end."""
    return role == "pad" or (role == "eos" and (task in TEXT_TO_TEXT or task == "language-modeling"))


def _class_for(task: Task) -> Any:
    if task in TEXT_TO_TEXT:
        return transformers.AutoModelForSeq2SeqLM
    if task == IMAGES:
        return transformers.AutoModelForImageClassification
    if task == "text-classification":
        return transformers.AutoModelForSequenceClassification
    return transformers.AutoModelForCausalLM
