"""The stage `trim-vocabulary`: remove unused tokens from tokenizer, embedding and output layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.compress.model_input import load_float_model
from smelt.compress.trim_vocabulary.select_tokens import (
    TrimVocabularySettings,
    compose_kept_tokens,
    read_kept_tokens,
    renumber_config,
    write_kept_tokens,
)
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.messages import Message, error_message
from smelt.data.tasks import Task, tasks_with
from smelt.models.families.registry import is_user_module, reads_arrays
from smelt.stage import Context, Need, Stage
from smelt.tasks.registry import task_spec

if TYPE_CHECKING:
    from smelt.compress.trim_vocabulary.vocabulary_rows import TokenizationChange

_MAX_CHANGED_SHARE = 0.05  # of the validation samples


class TrimVocabulary(Stage[TrimVocabularySettings]):
    """Remove tokens that the training samples never use.

    They are removed from the tokenizer, the embedding and the output layer. A pretrained vocabulary
    covers many languages and domains, and each token has a row in the embedding and in the output
    layer, which is multiplied in full in each step. Texts whose tokens are all kept are tokenized
    as before and get the same results; others are split into shorter tokens. Special tokens,
    characters and bytes are always kept, so no text gets new unknown tokens. The share of changed
    validation texts is reported. The teacher of distill need not be trimmed: the kept tokens are
    compared.

        - trim-vocabulary: {}
        - trim-vocabulary: {size: 8000}
        - distill: {epochs: 1}
    """

    name: ClassVar[str] = "trim-vocabulary"
    needs: ClassVar[frozenset[Need]] = frozenset({"train"})
    source: ClassVar[str] = (
        "Abdaoui et al. 2020, Load What You Need, arXiv:2010.05609; TextPruner, Yang et al. 2022,"
        " arXiv:2203.15996"
    )
    version: ClassVar[int] = 1
    changes_weights: ClassVar[bool] = False  # it sets the student's tokens
    needs_float: ClassVar[bool] = True
    settings_type: ClassVar[type[TrimVocabularySettings]] = TrimVocabularySettings
    tasks: ClassVar[frozenset[Task]] = frozenset(tasks_with(modality="text"))

    @classmethod
    def invalidates(cls, settings: TrimVocabularySettings) -> Mapping[str, str]:
        """Return what this step loses of earlier steps: entries of a shortlist for removed tokens."""
        return {
            "shortlist": "removed tokens lose their entries in the shortlist of '{step}', and the tokens that"
            " replace them have few; put trim-vocabulary before '{step}'"
        }

    @classmethod
    def check_model(
        cls, settings: TrimVocabularySettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return the errors, by setting, for a model of this config, and the config of the result."""
        vocab_size = config.get("vocab_size")
        errors: list[Message] = []
        if is_user_module(config) and not reads_arrays(config):  # whose task is refused
            text = "in a PyTorch module of your own the token embedding is not known. Remove the stage."
            errors.append(error_message("does-not-fit-model", text))
        if settings.size is not None and isinstance(vocab_size, int) and settings.size > vocab_size:
            text = (
                f"cannot keep {settings.size} tokens, because the model has only {vocab_size}. Decrease size."
            )
            errors.append(error_message("more-than-model-has", text, setting="size"))
        if config.get("share_encoder_decoder_embeddings") is False:
            errors.append(
                error_message(
                    "unsupported-tokenizer",
                    "source and target have separate vocabularies; only a shared vocabulary can be"
                    " trimmed. Remove the stage.",
                )
            )
        return errors, config

    def __call__(self, src: Artifact, settings: TrimVocabularySettings, ctx: Context) -> None:
        """Trim the vocabulary of the model in `src` and write it to `ctx.out`."""
        from smelt.runtimes.device import torch_threads

        with torch_threads(ctx.threads):
            self._trim(src, settings, ctx)

    def _trim(self, src: Artifact, settings: TrimVocabularySettings, ctx: Context) -> None:
        from smelt.compress.trim_vocabulary.tokenizers import (
            open_vocabulary,
            select_kept_tokens,
            trim_shortlist,
        )
        from smelt.compress.trim_vocabulary.vocabulary_rows import (
            count_tokens,
            keep_vocabulary_rows,
        )
        from smelt.models.checkpoint import count_stored_parameters, load_tokenizer, save_model

        if "train" not in ctx.data:
            raise InputError(
                "trim-vocabulary: training samples are required. Add data: {train: FILE}.",
                code="missing-data",
                setting="data.train",
            )
        model, edits = load_float_model(src, self.name)
        errors, _ = self.check_model(settings, model.config.to_dict())
        if errors:
            raise InputError(
                f"trim-vocabulary: {' '.join(error.message for error in errors)}",
                code=errors[0].code,
                messages=errors,
            )
        vocabulary, size = open_vocabulary(src.path, model.config), int(model.config.vocab_size)
        tokenizer = load_tokenizer(src.path)
        token_ids = {
            name: task_spec(ctx.task).token_rows(ctx.data[name], tokenizer) for name in _scored_splits(ctx)
        }
        kept_ids = select_kept_tokens(
            count_tokens(token_ids["train"], size), vocabulary, model, tokenizer, settings
        )
        new_ids = {old_id: new_id for new_id, old_id in enumerate(kept_ids)}
        parameters_before = count_stored_parameters(model)
        keep_vocabulary_rows(model, kept_ids)
        _renumber_configs(model, new_ids, size)
        ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))
        vocabulary.write(ctx.out, new_ids)
        write_kept_tokens(compose_kept_tokens(read_kept_tokens(src.path), kept_ids, size), ctx.out)
        trim_shortlist(ctx.out, new_ids, kept_ids, size)
        ctx.details.update(
            vocabulary_before=size, vocabulary_after=len(kept_ids), tokenizer=vocabulary.kind,
            parameters_before=parameters_before, parameters_after=count_stored_parameters(model),
        )  # fmt: skip
        if len(kept_ids) == size:
            ctx.warn(
                "nothing-to-trim",
                f"Nothing is removed: all {size:,} tokens occur in the training samples, or are needed so"
                " that no text has unknown tokens.",
            )
        elif ctx.traits.architecture == "decoder":
            other = "bits_per_byte" if ctx.traits.output == "next-token" else "scores of the generated texts"
            ctx.warn(
                "perplexity-by-token",
                f"Perplexity is measured per token, and the tokens have changed. Compare {other} instead.",
            )
        trimmed_tokenizer = load_tokenizer(ctx.out)
        for name, ids in token_ids.items():
            _report_change(
                name,
                ids,
                task_spec(ctx.task).token_rows(ctx.data[name], trimmed_tokenizer),
                new_ids,
                tokenizer.unk_token_id,
                ctx,
            )


def _scored_splits(ctx: Context) -> list[str]:
    return [name for name in ("train", "validation") if name in ctx.data]


def _renumber_configs(model: Any, new: Mapping[int, int], size: int) -> None:

    renumber_config(model.config, new, size)
    if model.can_generate():
        renumber_config(model.generation_config, new, size)


def _report_change(
    name: str, before: Any, after: Any, new: Mapping[int, int], unknown: int | None, ctx: Context
) -> None:
    """Compare the tokenization of a split before and after; report and warn.

    Raises:
        InputError: a text whose tokens are all kept is tokenized differently, or has new unknown tokens.
    """
    from smelt.compress.trim_vocabulary.vocabulary_rows import compare_tokenizations

    change: TokenizationChange = compare_tokenizations(before, after, new, unknown)
    ctx.details[name] = change.details()
    if change.wrong or change.unknown_after > change.unknown:
        reason = (
            f"{change.wrong} {name} texts whose tokens are all kept are tokenized differently"
            if change.wrong
            else f"the {name} texts have {change.unknown_after - change.unknown} more unknown tokens"
        )
        raise InputError(
            f"trim-vocabulary: this tokenizer cannot be trimmed safely: {reason}. Remove the stage, or"
            " increase size.",
            code="unsafe-trim",
        )
    share = change.changed / max(1, change.texts)
    if name == "validation" and share > _MAX_CHANGED_SHARE:
        ctx.warn(
            "tokens-changed",
            f"{share:.1%} of the validation texts are tokenized differently than before. Add training"
            " samples, or increase size or coverage.",
        )
