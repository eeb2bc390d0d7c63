"""Load the input model of a stage: unquantized weights, kept indices of pruned layers, parameter counts.

Changing a quantized model is restricted; the messages name recipes that avoid it. The plan checks a recipe
(without torch), and a stage checks its input model; both use the message code `behind-quantize`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.quantization.schemes.registry import SCHEMES
from smelt.stage import QuantizedInput

if TYPE_CHECKING:
    from smelt.models.edits import Edit


AFTER_QUANTIZE = "behind-quantize"
# Training settings that need float weights, each with a recipe that works
TRAINING_BEFORE_QUANTIZE = {
    "learned_masks": "masks are learned on float weights and folded into them at the end, so quantized"
    " weights would be rounded again. Learn the masks first: `- WORD: {learned_masks: {keep_ratio: 0.5}}`,"
    " `- quantize: {}`; or prune the quantized model and train it: `- quantize: {}`,"
    " `- prune: {targets: [heads, ffn]}`, `- WORD: {}`.",
    "sparsify": "gradual sparsification needs float weights. Sparsify first: `- WORD:"
    " {sparsify: {sparsity: 0.5}}`, `- quantize: {}`; or sparsify the quantized weights and train the"
    " remaining ones: `- quantize: {}`, `- sparsify: {}`, `- WORD: {}`.",
}

COMPILED_QUANTIZED = (
    "torch_compile: a quantized model is trained through float weights, whose layers change between updates,"
    " so torch_compile would compile them again each time. Remove torch_compile, or train adapters (lora)."
)


def split_pruning_error(quantized: QuantizedInput, stage: str) -> str | None:
    """Return why `stage` cannot remove units of split layers, and what to do; None if there are none."""
    if not quantized.is_split:
        return None
    halved = next(name for name, scheme in SCHEMES.items() if scheme.split_scheme)
    return (
        "the input model has layers that were split in two (qat: {weight_splitting: true}), whose units"
        " can only be removed from both halves. Put this step before that training:"
        f" `- quantize: {{scheme: {halved}}}`, `- {stage}: {{}}`,"
        " `- distill: {qat: {weight_splitting: true}}`."
    )


def codebook_error(quantized: QuantizedInput, stage: str) -> str | None:
    """Return why `stage` cannot change quantized weights, and what to do; None if there are no codebooks."""
    fitted = sorted(name for name in quantized.schemes if name in SCHEMES and SCHEMES[name].own_method)
    if not fitted:
        return None
    return (
        f"the codebooks of {' and '.join(fitted)} weights were fitted to the whole matrix, and its weights"
        f" cannot be rounded again. Put this step first: `- {stage}: {{}}`,"
        f" `- quantize: {{scheme: {fitted[0]}}}`."
    )


def require_no_codebooks(edits: Sequence[Edit], stage: str) -> None:
    """Check that the quantized layers of a model can be quantized again.

    Raises:
        InputError: some have codebooks for the whole matrix.
    """
    schemes = {str(edit["scheme"]) for edit in edits if edit.get("op") == "quantize"}
    if (text := codebook_error(QuantizedInput(tuple(schemes)), stage)) is not None:
        raise InputError(f"{stage}: {text}", code=AFTER_QUANTIZE)


def sparsity_error(quantized: QuantizedInput) -> str | None:
    """Return why quantized weights cannot be set to zero, and what to do; None if they can."""
    without_zero = sorted(
        name for name in quantized.schemes if name in SCHEMES and not SCHEMES[name].represents_zero
    )
    if without_zero:
        with_zero = [name for name, scheme in SCHEMES.items() if scheme.represents_zero]
        return (
            f"{' and '.join(without_zero)} weights have no exact zero. Quantize with a scheme that has one"
            f" ({', '.join(with_zero)}): `- quantize: {{scheme: {with_zero[0]}}}`, `- sparsify: {{}}`."
        )
    if quantized.has_corrections:
        return (
            "the input model has low-rank corrections (low_rank_correction, lora), which fill the zeros."
            " Remove them from the earlier steps: `- quantize: {}`, `- sparsify: {}`, `- finetune: {}`."
        )
    return None


def load_float_model(src: Artifact, stage: str) -> tuple[Any, list[Edit]]:
    """Return the model of `src` (float32, CPU, eval mode) and its edits.

    Raises:
        InputError: the model is quantized; its integer weights have no gradient and no spectrum.
    """
    from smelt.models.checkpoint import load_model
    from smelt.models.edits import read_edits

    if any(edit.get("op") == "quantize" for edit in read_edits(src.path)):
        raise InputError(
            f"{stage}: the input model is quantized, and integer weights cannot be changed."
            f" Put '{stage}' before 'quantize' in the recipe.",
            code=AFTER_QUANTIZE,
        )
    return load_model(src.path)
