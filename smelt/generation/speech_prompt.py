"""The tokens that begin every output of a Whisper: language, task, and that there are no timestamps.

As `generate` of transformers determines them (`_retrieve_init_tokens` in generation_whisper.py, 5.23), except
that the language of the audio is not detected: a multilingual model needs one, since a batch has one prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smelt.core.errors import InputError, did_you_mean


def speech_start_tokens(
    generation: Mapping[str, Any], config: Mapping[str, Any], language: str | None = None
) -> list[int]:
    """Return the tokens after the decoder's first one.

    Args:
        generation: generation_config.json.
        config: config.json.
        language: of the audio, as en, <|en|> or English; None: that of the generation config.

    Raises:
        InputError: `missing-language` of a multilingual model, `unknown-language`, or `unused-setting` of a
            model without languages.
    """
    languages: Mapping[str, int] = generation.get("lang_to_id") or {}
    language = language or generation.get("language")
    task = generation.get("task")
    tokens: list[int] = []
    if language is not None:
        tokens = [_language_token(language, languages)]
    elif task is None:
        forced = generation.get("forced_decoder_ids") or config.get("forced_decoder_ids") or []
        tokens = [token for position, token in forced if position == len(tokens) + 1 or token is not None]
        if forced and forced[0][1] is None:
            tokens = []
    if languages and language is None and not tokens:
        raise InputError(
            f"generation_config.json: this model knows {len(languages)} languages, and none is set. Set"
            " language in score.generation (language: en), or in generation_config.json.",
            code="missing-language",
            setting="language",
        )
    tasks: Mapping[str, int] = generation.get("task_to_id") or {}
    if tasks and not set(tokens) & set(tasks.values()):
        tokens.append(tasks[task or "transcribe"])
    timestamps_off = generation.get("no_timestamps_token_id")
    return tokens if timestamps_off is None or timestamps_off in tokens[-1:] else [*tokens, timestamps_off]


def _language_token(language: str, languages: Mapping[str, int]) -> int:
    if not languages:
        raise InputError(
            f"language: {language}: this model has no languages to choose from. Remove language.",
            code="unused-setting",
            setting="language",
        )
    name = language.lower().removeprefix("<|").removesuffix("|>")
    if f"<|{name}|>" not in languages:
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

        name = TO_LANGUAGE_CODE.get(name, name)
    token = languages.get(f"<|{name}|>")
    if token is None:
        known = [each.strip("<|>") for each in languages]
        raise InputError(
            f"language: '{language}' is not one of the model's: {', '.join(known[:10])}"
            f"{', ...' if len(known) > 10 else ''}.{did_you_mean(name, known)}",
            code="unknown-language",
            setting="language",
        )
    return token
