"""Are the codes in a model's folder ones that smelt takes over? Read from its config and headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.data import CLASSIFICATION, Task
from smelt.core.errors import InputError
from smelt.core.messages import Message, mistake
from smelt.recipe.problem import has_classifier
from smelt.runtime.models.coded.headers import require_codes, unsaid_codes
from smelt.runtime.models.coded.said import SAID, coding_of, no_other_head
from smelt.runtime.models.making.seq2seq_head import lacks_head


def codes_problems(folder: Path, config: Mapping[str, Any], task: Task | None, whole: bool) -> list[Message]:
    """Return why the codes that a config speaks of cannot be taken over, if they cannot.

    What only their values say (another order of inputs, zero points of 16, scales that float16 does not
    hold), and whether they fit the sizes in the config, is seen by the run, which reads them.

    Args:
        folder: of the model.
        config: its Hugging Face config; empty for none.
        task: what the model is for; None where that is not known.
        whole: whether the headers of the weights can be read.
    """
    try:
        coding = coding_of(config)
    except InputError as error:
        return [error.as_message().prefixed(f"{folder / 'config.json'}: ")]
    try:
        if coding is None:
            return _unsaid(folder) if whole else []
        if whole:
            require_codes(folder, coding)
    except InputError as error:
        return [error.as_message()]
    wants_head = lacks_head(config) or (task in CLASSIFICATION and not has_classifier(config))
    return [mistake("head-on-quantized", f"{folder}: {no_other_head(coding)}")] if wants_head else []


def _unsaid(folder: Path) -> list[Message]:
    """Say that weights are codes, where the config does not say what they mean."""
    layer = unsaid_codes(folder)
    if layer is None:
        return []
    return [
        mistake(
            "missing-quantization-config",
            f"{folder}: '{layer}.qweight' and other tensors are codes, and config.json has no {SAID} that"
            " says what they mean. Older tools wrote that into a file beside it (quantize_config.json,"
            f" quant_config.json): put its content into config.json under {SAID}, with quant_method: gptq or"
            " awq.",
        )
    ]
