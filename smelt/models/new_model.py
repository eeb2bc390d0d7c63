"""A model with random weights, from its config and a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from smelt.core.errors import InputError
from smelt.core.messages import Message, warning
from smelt.core.text import with_article
from smelt.data.labels import ProblemType
from smelt.data.splits import IMAGE_CLASSIFICATION, TEXT_TO_TEXT_TASKS, Task
from smelt.generation.shortlist import SHORTLIST_FILE as SHORTLIST
from smelt.models.checkpoint import load_tokenizer, save_model
from smelt.models.families.registry import FAMILIES, family_of
from smelt.models.import_model import configure_embedder
from smelt.models.sentence_model import sentence_class
from smelt.models.text_rules import SentenceRules

_NOT_SETTINGS = frozenset({"model_type", "architectures", "transformers_version"})


def create_model(
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
    """Write a model with random weights, drawn with `seed`, and its tokenizer into `out`.

    An image model has an image processor instead. Vocabulary size and special tokens of the config are set to
    the tokenizer's.

    Args:
        values: a Hugging Face config.
        tokenizer_folder: the folder of the tokenizer (or preprocessor_config.json).
        out: the new model folder.
        task: of the model; selects its class.
        seed: of the weights.
        exact: the vocabulary has the size of the tokenizer, also where the config's is larger.
        labels: names of a classifier's outputs.
        problem: kind of classification.
        sentences: pooling and normalization of a sentence embedder.

    Returns:
        Warnings about changes to the config.

    Raises:
        InputError: transformers cannot create a model from this config, or the tokenizer lacks a token that
            the model needs.
    """
    agreed = (
        {}
        if task == IMAGE_CLASSIFICATION
        else config_for_tokenizer(values, load_tokenizer(tokenizer_folder), task, exact)
    )
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
            model = _auto_class(task).from_config(config, dtype=torch.float32, trust_remote_code=False)
        else:
            model = sentence_class(config, sentences)(config)
    except Exception as error:  # configs and models raise many kinds of exceptions
        raise InputError(
            f"model.config: transformers cannot create a model from it: {error}",
            code="wrong-config",
            setting="model.config",
        ) from error
    for name, value in agreed.items():
        if model.can_generate() and hasattr(model.generation_config, name):
            setattr(model.generation_config, name, value)
    family = family_of(model)
    if family is not None and family.suppresses_pad:
        model.generation_config.bad_words_ids = [[config.pad_token_id]]  # as its checkpoints do
    model.eval()
    save_model(model, [], out, tokenizer_folder, "fp32")
    (out / SHORTLIST).unlink(missing_ok=True)  # it belongs to the original model of the tokenizer
    if sentences is not None:
        configure_embedder(out, sentences)
    return [
        warning(
            "config-changed", f"{name} is {value}, as in the tokenizer; it was {values[name]} in the config."
        )
        for name, value in agreed.items()
        if values.get(name) not in (None, value)
    ]


def config_for_tokenizer(
    values: Mapping[str, Any], tokenizer: Any, task: Task, exact: bool
) -> dict[str, Any]:
    """Return the vocabulary size and the special tokens that a config needs to match `tokenizer`.

    A vocabulary larger than the tokenizer's is kept, unless it must be `exact`: some
    are padded to a round number.

    Raises:
        InputError: the tokenizer lacks a token that the model needs.
    """
    kind, size = str(values["model_type"]), len(tokenizer)
    declared = values.get("vocab_size")
    wanted: dict[str, Any] = {"vocab_size": size if exact or not declared else max(size, int(declared))}
    if values.get("decoder_vocab_size"):
        wanted["decoder_vocab_size"] = wanted["vocab_size"]
    for role in ("pad", "eos", "bos"):
        token = getattr(tokenizer, f"{role}_token_id", None)
        if token is None and _requires_token(role, task):
            raise InputError(
                f"model.tokenizer: the tokenizer has no {role} token, which {with_article(kind)} model"
                f" for {task} needs. Add one: tokenizer.{role}_token = ...;"
                " tokenizer.save_pretrained(FOLDER).",
                code="missing-special-token",
                setting="model.tokenizer",
            )
        wanted[f"{role}_token_id"] = token
    if task in TEXT_TO_TEXT_TASKS:
        family = FAMILIES[kind]
        wanted["decoder_start_token_id"] = wanted[f"{family.decoder_start}_token_id"]
        if family.forces_eos:
            wanted["forced_eos_token_id"] = wanted["eos_token_id"]
    return wanted


def _requires_token(role: str, task: Task) -> bool:
    """Return whether a model for `task` needs the token: generated text has to end."""
    return role == "pad" or (role == "eos" and (task in TEXT_TO_TEXT_TASKS or task == "language-modeling"))


def _auto_class(task: Task) -> Any:
    if task in TEXT_TO_TEXT_TASKS:
        return transformers.AutoModelForSeq2SeqLM
    if task == IMAGE_CLASSIFICATION:
        return transformers.AutoModelForImageClassification
    if task == "text-classification":
        return transformers.AutoModelForSequenceClassification
    return transformers.AutoModelForCausalLM
