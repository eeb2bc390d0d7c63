"""Storing a model's rules for texts in its folder, and the token that its target language begins with."""

from __future__ import annotations

from pathlib import Path

from transformers import GenerationConfig

from smelt.core.files import read_json, write_json
from smelt.runtime.models.checkpoint import load_tokenizer
from smelt.runtime.models.making.empty_model import load_config
from smelt.runtime.text.rules import FILE, TextRules, language_token


def write_text_rules(folder: Path, rules: TextRules) -> None:
    """Store `rules` in the model's `folder`, where nothing is left of others.

    A target language also becomes the token that generation begins with: the decoder's start for
    MBartTokenizer (mBART-25), else the forced first word (mBART-50), as transformers' tokenizers document.

    Raises:
        InputError: the tokenizer does not know a language.
    """
    if rules == TextRules():
        (folder / FILE).unlink(missing_ok=True)
        return
    write_json(folder / FILE, rules.model_dump(exclude_defaults=True))
    if rules.target_language is None:
        return
    tokenizer, config = load_tokenizer(folder), load_config(folder)
    token = language_token(tokenizer, rules.target_language)
    path = folder / "generation_config.json"
    said = read_json(path) or GenerationConfig.from_model_config(config).to_dict()
    if type(tokenizer).__name__ == "MBartTokenizer":
        said["decoder_start_token_id"] = config.decoder_start_token_id = token
        config.save_pretrained(folder)
    else:
        said["forced_bos_token_id"] = token
    GenerationConfig.from_dict(said).save_pretrained(folder)
