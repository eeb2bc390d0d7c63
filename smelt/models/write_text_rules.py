"""Stores a model's text rules in its folder, and the first token of its target language."""

from __future__ import annotations

from pathlib import Path

from transformers import GenerationConfig

from smelt.core.files import read_json_object, write_json
from smelt.models.checkpoint import load_tokenizer
from smelt.models.empty_model import load_config
from smelt.models.text_rules import TEXT_RULES_FILE, TextRules, language_token_id


def write_text_rules(folder: Path, rules: TextRules) -> None:
    """Write `rules` to the model's `folder`, replacing earlier ones.

    A target language also becomes the first generated token: the decoder's start for
    MBartTokenizer (mBART-25), else the forced first token (mBART-50), as transformers' tokenizers document.

    Raises:
        InputError: the tokenizer does not have a language.
    """
    if rules == TextRules():
        (folder / TEXT_RULES_FILE).unlink(missing_ok=True)
        return
    write_json(folder / TEXT_RULES_FILE, rules.model_dump(exclude_defaults=True))
    if rules.target_language is None:
        return
    tokenizer, config = load_tokenizer(folder), load_config(folder)
    token = language_token_id(tokenizer, rules.target_language)
    path = folder / "generation_config.json"
    settings = read_json_object(path) or GenerationConfig.from_model_config(config).to_dict()
    if type(tokenizer).__name__ == "MBartTokenizer":
        settings["decoder_start_token_id"] = config.decoder_start_token_id = token
        config.save_pretrained(folder)
    else:
        settings["forced_bos_token_id"] = token
    GenerationConfig.from_dict(settings).save_pretrained(folder)
