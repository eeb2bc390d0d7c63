"""Masked language modeling: the probability of masked tokens of running text, which is cut into windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from smelt.data.labels import LABEL_SEPARATOR
from smelt.data.splits import Example, Split
from smelt.tasks.language_modeling import LanguageModeling
from smelt.tasks.spec import PackageClass

if TYPE_CHECKING:
    from smelt.generation.config import GenerationSettings
    from smelt.generation.prompt_batches import OnTruncate
    from smelt.runtimes.fill_mask import MaskPredictions
    from smelt.tasks.samples import EncodedSample


class MaskedLanguageModeling(LanguageModeling):
    """Masked language modeling."""

    name = "masked-language-modeling"
    method = "fill_mask"
    command_input = '"TEXT with a mask token"'
    call = "text to tokens"
    call_includes = "tokenizing is"
    suggested_metrics = ("perplexity", "masked_accuracy")
    hub_tag = "fill-mask"
    graph_output = "logits"
    package = PackageClass("fill_mask", "MaskFiller", 'print(MaskFiller()(["TEXT WITH A MASK TOKEN"]))')

    def recognizes_model(self, config: Mapping[str, Any], is_embedder: bool) -> bool:
        """Return whether the checkpoint has the head of a masked language model."""
        return any(str(name).endswith("ForMaskedLM") for name in config.get("architectures") or ())

    def encode(
        self, split: Split, config: Any, tokenizer: Any, limit: int, length: int | None
    ) -> tuple[list[EncodedSample], int]:
        """Return the windows of the text that all samples are, as `TaskSpec.encode`."""
        from smelt.models.masked_windows import TokenMasker, cut_bidirectional_windows
        from smelt.tasks.samples import masked_samples

        windows = cut_bidirectional_windows(split, tokenizer, limit, length)
        return masked_samples(windows, TokenMasker(tokenizer)), 0

    def run(
        self,
        runner: Any,
        examples: Sequence[Example],
        generation: GenerationSettings,
        batch_size: int,
        on_truncate: OnTruncate | None = None,
    ) -> Sequence[MaskPredictions]:
        """Return the predictions for the masked tokens of each example, none for one without any."""
        from smelt.runtimes.fill_mask import fill_masks

        return fill_masks(runner, [example.text for example in examples], batch_size, on_truncate=on_truncate)

    def predict(
        self,
        runner: Any,
        examples: Sequence[Example],
        generation: GenerationSettings,
        batch_size: int,
        on_truncate: OnTruncate | None = None,
        top_k: int | None = None,
    ) -> Sequence[MaskPredictions]:
        """Return the predictions for each example, as `TaskSpec.predict`.

        Raises:
            InputError: `missing-mask-token`, `truncated-mask-token`: of an example.
        """
        from smelt.runtimes.fill_mask import TOP_K, fill_masks, require_mask_tokens

        texts = [example.text for example in examples]
        require_mask_tokens(runner, texts)
        return fill_masks(runner, texts, batch_size, top_k or TOP_K, on_truncate)

    def result_line(self, result: MaskPredictions) -> str:
        """Return the likeliest token of each mask, joined by `|`, a tab, and their probabilities."""
        best = [predictions[0] for predictions in result]
        tokens = LABEL_SEPARATOR.join(prediction.token_str for prediction in best)
        return tokens + "\t" + LABEL_SEPARATOR.join(f"{prediction.score:.3f}" for prediction in best)

    def result_fields(self, result: MaskPredictions) -> dict[str, Any]:
        """Return the likeliest tokens of each mask, as the fill-mask pipeline of transformers."""
        return {"masks": [[prediction._asdict() for prediction in predictions] for predictions in result]}


TASK = MaskedLanguageModeling()
