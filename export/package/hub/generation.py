"""How the model was scored, as arguments of transformers' `generate`."""

from __future__ import annotations

from smelt.export.package.form import Origin


def generation_words(origin: Origin) -> str:
    """Return the settings that the scores were made with as arguments of `generate`, with a comma before."""
    known = {"num_beams", "max_new_tokens", "min_new_tokens", "length_penalty", "no_repeat_ngram_size"}
    said = {k: v for k, v in origin.generation.items() if k in known}
    return "".join(f", {word}={value!r}" for word, value in said.items())
