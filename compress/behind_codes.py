"""What cannot be done to a model of codes, and the chain of steps that does it; no torch.

The plan says it of a recipe, a stage of the model that it reads: both under the code `behind-quantize`.
"""

from __future__ import annotations

from dataclasses import dataclass

from smelt.runtime.schemes.registry import SCHEMES

BEHIND_QUANTIZE = "behind-quantize"
# What a training does to weights, by its setting, and the chain that does it
IN_TRAINING = {
    "learned_masks": "masks are learned with float weights: they go into these at the end, and codes would"
    " be rounded"
    " again. Learn them first: `- WORD: {learned_masks: {keep_ratio: 0.5}}`, `- quantize: {}`; or cut what"
    " is quantized"
    " and train it: `- quantize: {}`, `- prune: {targets: [heads, ffn]}`, `- WORD: {}`.",
    "sparsify": "zeros that come step by step are chosen among float weights. Train them first: `- WORD:"
    " {sparsify: {sparsity: 0.5}}`, `- quantize: {}`; or set codes to zero and train what stays:"
    " `- quantize: {}`, `- sparsify: {}`, `- WORD: {}`.",
}


@dataclass(frozen=True)
class CodesBefore:
    """The codes of the linear layers that a step gets.

    schemes: theirs. pairs: whether something of low rank stands beside them. split: whether they are halves
    of layers. one_bit: whether they have binary inputs.
    """

    schemes: tuple[str, ...]
    pairs: bool = False
    split: bool = False
    one_bit: bool = False

    def units_held(self, stage: str) -> str | None:
        """Return why the step of the word `stage` cannot change them, and what to do; None where it can."""
        if self.split:
            what = (
                "layers that were split in two (qat: {weight_splitting: true}), and what goes from one goes"
                " from both"
            )
            training, fit = "weight_splitting: true", [name for name, one in SCHEMES.items() if one.halves]
        elif self.one_bit:
            what = "layers with inputs of two values (activations: one-bit), each with a shift of its own"
            training, fit = "activations: one-bit", [n for n, one in SCHEMES.items() if one.binary_inputs]
        else:
            return None
        return (
            f"it gets {what}. Put it before that training: `- quantize: {{scheme: {fit[0]}}}`,"
            f" `- {stage}: {{}}`, `- distill: {{qat: {{{training}}}}}`."
        )

    def zeros_lacking(self) -> str | None:
        """Return why weights of these codes cannot be set to zero, and what to do; None where they can."""
        without = sorted(name for name in self.schemes if name in SCHEMES and not SCHEMES[name].zero)
        if without:
            own = [name for name, one in SCHEMES.items() if one.zero]
            return (
                f"{' and '.join(without)} codes have no exact zero. Quantize with a scheme that has one"
                f" ({', '.join(own)}): `- quantize: {{scheme: {own[0]}}}`, `- sparsify: {{}}`."
            )
        if self.pairs:
            return (
                "the layers before it have a low-rank pair beside their codes (low_rank_correction, lora),"
                " which fills"
                " the zeros. Leave it out before them: `- quantize: {}`, `- sparsify: {}`, `- finetune: {}`."
            )
        return None
