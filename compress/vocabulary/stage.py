"""Trimming the vocabulary: words that the data never use go from tokenizer, embedding and head together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.compress.float_model import load_float, stored_parameters
from smelt.compress.vocabulary.settings import TrimVocabularySettings
from smelt.core.artifact import Artifact, Format
from smelt.core.data import TEXT_TASKS, Task
from smelt.core.errors import InputError
from smelt.core.messages import Message, mistake
from smelt.core.stage import Context, Need

if TYPE_CHECKING:
    from smelt.compress.vocabulary.counting import Change

_MANY = 0.05  # of the validation texts


class TrimVocabulary:
    """Remove the words that the training rows never use, from tokenizer, embedding and head together.

    A checkpoint knows words of many languages and fields, and a row of the embedding, and of the head that
    multiplies with all of them in each step, belongs to every one. Texts whose tokens all stay are cut as
    before and get the same results; others are cut into shorter tokens: special tokens, characters and bytes
    always stay, so that nothing becomes unknown that was not. How many validation texts change is reported.
    A teacher that was not trimmed still teaches: distill compares the words that stayed.

        - trim-vocabulary: {}
        - trim-vocabulary: {size: 8000}
        - distill: {epochs: 1}
    """

    name: ClassVar[str] = "trim-vocabulary"
    accepts: ClassVar[frozenset[Format]] = frozenset({"torch"})
    produces: ClassVar[Format] = "torch"
    needs: ClassVar[frozenset[Need]] = frozenset({"train"})
    source: ClassVar[str] = (
        "Abdaoui et al. 2020, Load What You Need, arXiv:2010.05609; TextPruner, Yang et al. 2022,"
        " arXiv:2203.15996"
    )
    version: ClassVar[int] = 1
    needs_float: ClassVar[bool] = True
    settings_type: ClassVar[type[TrimVocabularySettings]] = TrimVocabularySettings
    tasks: ClassVar[frozenset[Task]] = frozenset(TEXT_TASKS)

    @classmethod
    def spoils(cls, settings: TrimVocabularySettings) -> Mapping[str, str]:
        """Return what is lost of the work of steps before it: what a shortlist says of words that go."""
        return {
            "shortlist": "words that go take what the shortlist of '{step}' learned of them along, and of"
            " those that texts are cut into afterwards it learned little; put vocabulary before '{step}'"
        }

    @classmethod
    def check_model(
        cls, settings: TrimVocabularySettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return what does not fit a model of this config, by setting, and the config of the result."""
        words = config.get("vocab_size")
        found: list[Message] = []
        if settings.size is not None and isinstance(words, int) and settings.size > words:
            text = f"{settings.size} tokens cannot stay of {words}."
            found.append(mistake("more-than-model-has", text, setting="size"))
        if config.get("share_encoder_decoder_embeddings") is False:
            found.append(
                mistake(
                    "unsupported-tokenizer",
                    "source and target have a vocabulary each; only a shared one can be trimmed.",
                )
            )
        return found, config

    def __call__(self, src: Artifact, settings: TrimVocabularySettings, ctx: Context) -> None:
        """Trim the vocabulary of the model in `src` and write it to `ctx.out`."""
        from smelt.compress.train.state import threads

        with threads(ctx.threads):
            self._trim(src, settings, ctx)

    def _trim(self, src: Artifact, settings: TrimVocabularySettings, ctx: Context) -> None:
        from smelt.compress.vocabulary.counting import counted, token_rows
        from smelt.compress.vocabulary.files import numbers_that_stay, open_words, trim_shortlist
        from smelt.compress.vocabulary.kept import read_kept, trimmed_further, write_kept
        from smelt.compress.vocabulary.rows import keep_rows
        from smelt.runtime.models.checkpoint import load_tokenizer, save_model

        if "train" not in ctx.data:
            raise InputError(
                "trim-vocabulary: needs training rows. Name them with data: {train: FILE}.",
                code="missing-data",
                setting="data.train",
            )
        model, edits = load_float(src, self.name)
        found, _ = self.check_model(settings, model.config.to_dict())
        if found:
            raise InputError(
                f"trim-vocabulary: {' '.join(one.message for one in found)}", code=found[0].code, found=found
            )
        words, size = open_words(src.path, model.config), int(model.config.vocab_size)
        tokenizer = load_tokenizer(src.path)
        rows = {name: token_rows(ctx.data[name], tokenizer, ctx.task) for name in _splits(ctx)}
        kept = numbers_that_stay(counted(rows["train"], size), words, model, tokenizer, settings)
        new = {old: at for at, old in enumerate(kept)}
        before = stored_parameters(model)
        keep_rows(model, kept)
        _renumber(model, new, size)
        ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))
        words.write(ctx.out, new)
        write_kept(trimmed_further(read_kept(src.path), kept, size), ctx.out)
        trim_shortlist(ctx.out, new, kept, size)
        ctx.details.update(
            vocabulary_before=size, vocabulary_after=len(kept), tokenizer=words.kind,
            parameters_before=before, parameters_after=stored_parameters(model),
        )  # fmt: skip
        if len(kept) == size:
            ctx.warn(
                "nothing-to-trim",
                f"Nothing is removed: all {size:,} tokens occur in the training samples, or are needed so"
                " that no text has unknown tokens.",
            )
        elif ctx.task == "language-modeling":
            ctx.warn(
                "perplexity-by-token",
                "Perplexity is per token, and the tokens have changed; compare bits_per_byte.",
            )
        again = load_tokenizer(ctx.out)
        for name, ids in rows.items():
            _tell(name, ids, token_rows(ctx.data[name], again, ctx.task), new, tokenizer.unk_token_id, ctx)


def _splits(ctx: Context) -> list[str]:
    return [name for name in ("train", "validation") if name in ctx.data]


def _renumber(model: Any, new: Mapping[int, int], size: int) -> None:
    from smelt.compress.vocabulary.numbers import renumber

    renumber(model.config, new, size)
    if model.can_generate():
        renumber(model.generation_config, new, size)


def _tell(
    name: str, before: Any, after: Any, new: Mapping[int, int], unknown: int | None, ctx: Context
) -> None:
    """Compare the texts of a split before and after; tell the report and the user.

    Raises:
        InputError: a text whose tokens all stayed is cut otherwise, or something became unknown.
    """
    from smelt.compress.vocabulary.counting import change

    found: Change = change(before, after, new, unknown)
    ctx.details[name] = found.details()
    if found.wrong or found.unknown_after > found.unknown:
        what = (
            f"{found.wrong} {name} texts whose tokens all stay are cut otherwise by it"
            if found.wrong
            else f"of the {name} texts {found.unknown_after - found.unknown} more tokens are unknown to it"
        )
        raise InputError(
            f"trim-vocabulary: this tokenizer cannot be trimmed safely: {what}. Leave the stage out, or give"
            " a larger size.",
            code="unsafe-trim",
        )
    share = found.changed / max(1, found.texts)
    if name == "validation" and share > _MANY:
        ctx.warn(
            "tokens-changed",
            f"{share:.1%} of the validation texts are tokenized differently than before. Add training"
            " samples, or increase size or coverage.",
        )
