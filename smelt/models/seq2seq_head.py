"""Adds an output layer to a checkpoint of the bare encoder and decoder, such as facebook/bart-base."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.messages import Message, warning, with_article


def lacks_head(config: Mapping[str, Any]) -> bool:
    """Return whether `config` (config.json) is that of an encoder and a decoder without an output layer."""
    names = [str(name) for name in config.get("architectures") or ()]
    # MarianMTModel has an output layer despite its name
    bare = bool(names) and names[0].endswith("Model") and not names[0].endswith("MTModel")
    return bare and bool(config.get("is_encoder_decoder"))


def add_tied_head(src: Path, out: Path) -> list[Message]:
    """Write the model of `src` into `out` with its word embedding as output layer; return a note.

    Raises:
        InputError: the config requires an untied output layer, which the checkpoint does not have, or its
            weights and its config do not match.
    """
    import torch
    import transformers

    from smelt.models.checkpoint import require_base_weights, save_model
    from smelt.models.empty_model import silence_transformers

    with silence_transformers():
        model, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(
            src,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # raises an error below
        )
    name = model.config.model_type
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        raise InputError(
            f"{src}: {with_article(name)} model without an output layer, and its config does not tie"
            " the output layer to the token embedding (tie_word_embeddings: false). Start from a"
            " checkpoint that generates text.",
            code="missing-output-layer",
        )
    require_base_weights(name, info, src)
    notes = save_model(model, [], out, src)
    return [
        *notes,
        warning(
            "tied-output-head",
            "The checkpoint has no output layer; the token embedding is used, as set in its config.",
        ),
    ]
