"""Return the generation settings of the scores as arguments of transformers' `generate`."""

from __future__ import annotations

from smelt.export.package.package_format import PackageOrigin


def generate_arguments(origin: PackageOrigin) -> str:
    """Return the generation settings of the scores as arguments of `generate`, with a leading comma."""
    known = {"num_beams", "max_new_tokens", "min_new_tokens", "length_penalty", "no_repeat_ngram_size"}
    said = {k: v for k, v in origin.generation.items() if k in known}
    return "".join(f", {word}={value!r}" for word, value in said.items())
