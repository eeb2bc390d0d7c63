"""A model that generates, from a checkpoint of the bare encoder and decoder, as facebook/bart-base is one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.messages import Message, warning
from smelt.core.text import article


def lacks_head(config: Mapping[str, Any]) -> bool:
    """Say whether `config` (as config.json) is that of an encoder and a decoder without an output head."""
    names = [str(name) for name in config.get("architectures") or ()]
    # MarianMTModel has a head, whatever its name sounds like
    bare = bool(names) and names[0].endswith("Model") and not names[0].endswith("MTModel")
    return bare and bool(config.get("is_encoder_decoder"))


def add_tied_head(src: Path, out: Path) -> list[Message]:
    """Write the model of `src` into `out` with its word embedding as its output head; return a note.

    Raises:
        InputError: the config wants a head of its own, which the checkpoint does not have, or its weights and
            its config do not belong together.
    """
    import torch
    import transformers

    from smelt.runtime.models.checkpoint import save_model
    from smelt.runtime.models.places.weights_fit import require_body
    from smelt.runtime.models.quiet import quiet

    with quiet():
        model, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(
            src,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, in words
        )
    name = model.config.model_type
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        raise InputError(
            f"{src}: {article(name)} model without an output head, whose config says that it is not the word"
            " embedding (tie_word_embeddings: false). Start from a checkpoint that generates text.",
            code="missing-output-layer",
        )
    require_body(name, info, src)
    notes = save_model(model, [], out, src)
    return [
        *notes,
        warning(
            "tied-output-head",
            "The checkpoint has no output layer; the word embedding is used, as its config says.",
        ),
    ]
