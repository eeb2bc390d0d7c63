"""infer.json: what infer.py has to know of the model, so that it answers as the artifact was scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import Artifact, threads_of
from smelt.core.data import IMAGES, SIMILARITY
from smelt.core.errors import InputError
from smelt.core.files import read_json
from smelt.core.labels import class_names, problem_type
from smelt.runtime.images.processor import read_processor

if TYPE_CHECKING:
    from smelt.runtime.generate.decoding import Decoding

_CLASSIFIES = "text-classification"
_PASSED_ON = ("eos_token_ids", "pad_token_id", "decoder_start_token_id", "text_rules", "no_repeat_ngram_size")
_OF_BEAMS = ("num_beams", "length_penalty", "early_stopping", "never_stop_early", "renormalize_logits")
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "seed")


def settings_of(artifact: Artifact, generation: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return infer.json, and notes for the README.

    Args:
        artifact: an export for ONNX Runtime on the CPU.
        generation: the recipe's `score.generation`.

    Raises:
        InputError: the model's own generation settings ask for what its graphs do not do.
    """
    config = read_json(artifact.path / "config.json")
    task = artifact.manifest.task
    made: dict[str, Any] = {"task": task, "threads": threads_of(artifact.manifest)}
    notes: list[str] = []
    if task == IMAGES:
        return made | {"images": images(artifact)} | _classes(config), notes
    limit, tokenizer = _tokenizer(artifact, config)
    made["tokenizer"] = tokenizer
    if task == _CLASSIFIES:
        made |= _classes(config)
    elif task == SIMILARITY:
        from smelt.families.registry import find_family

        family = find_family(config)
        made["width"] = int(config[family.width]) if family else 0
    else:
        made["generation"], notes = _generation(artifact, config, generation)
        if not config.get("is_encoder_decoder"):  # prompts are cut by the length that is asked
            made["generation"]["limit"], tokenizer["limit"] = limit, None
    return made, notes


def _classes(config: dict[str, Any]) -> dict[str, Any]:
    return {"labels": class_names(config), "problem": problem_type(config)}


def images(artifact: Artifact) -> dict[str, Any]:
    """Return how an image becomes what the graph reads.

    Raises:
        InputError: its preprocessor_config.json is missing, or says what smelt does not follow.
    """
    return asdict(read_processor(artifact.path))


def _tokenizer(artifact: Artifact, config: dict[str, Any]) -> tuple[int | None, dict[str, Any]]:
    """Return the most tokens of a text, None for any number, and what the reader has to know."""
    from smelt.runtime.generate.prompts import pad_of
    from smelt.runtime.text.limits import NO_LIMIT, length_limit
    from smelt.runtime.text.open_tokenizer import open_tokenizer
    from smelt.runtime.text.rules import read_text_rules
    from smelt.runtime.text.rust_tokenizer import CLEAN
    from smelt.runtime.text.tokenizing_file import read_tokenizing

    said, rules = read_tokenizing(artifact.path), read_text_rules(artifact.path)
    words = open_tokenizer(artifact.path)
    limit: int | None = length_limit(words, config)
    limit = None if limit is None or limit >= NO_LIMIT else limit
    left = not config.get("is_encoder_decoder") and artifact.manifest.task == "language-modeling"
    pad = pad_of(words) if left else words.pad_token_id or 0
    kept = said.model_dump(exclude={"reason", "longest", "clean_up"})
    more = {"replace": CLEAN if said.clean_up else [], "prefix": rules.prefix, "lower": rules.lower}
    return limit, {**kept, "pad": pad, "limit": limit, **more}


def _generation(
    artifact: Artifact, config: dict[str, Any], wishes: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return how texts are generated, with every gap filled, and what to tell of it."""
    from smelt.runtime.generate.decoding import settle
    from smelt.runtime.generate.in_graph import does
    from smelt.runtime.generate.settings import Generation
    from smelt.runtime.runner import read_files

    notes = []
    if wishes.get("do_sample"):
        notes = ["The recipe draws tokens at random; infer.py takes the most likely token of each step."]
        wishes = {name: value for name, value in wishes.items() if name not in _SAMPLING}
    model: Any = read_files(artifact.path)
    decoding = settle(Generation(**wishes), model)
    if not does(decoding):
        raise InputError(
            "its generation settings have bad words of several tokens, or remove_invalid_values, which the"
            " graph of a whole generation does not do. Remove them from recipe or generation_config.json.",
            code="unsupported-generation-setting",
        )
    return written(decoding, int(config.get("decoder_vocab_size") or config["vocab_size"])), notes


def written(decoding: Decoding, vocabulary: int) -> dict[str, Any]:
    """Return how to search: what infer.py makes rules of, and inputs of the graph that it passes on."""
    from smelt.runtime.backends.backend import BEAMS, GREEDY
    from smelt.runtime.generate.in_graph import feeds_of

    feeds = feeds_of(decoding, 1, vocabulary)
    one = decoding.start is not None  # the prompt is one token, and so the longest output is known
    kept = ("max_new_tokens", "max_length", "min_new_tokens", "min_length", "positions", "repetition_penalty")
    first = decoding.forced_bos_token_id
    return {
        "graph": f"{BEAMS if decoding.num_beams > 1 else GREEDY}.onnx",
        **{name: getattr(decoding, name) for name in kept},
        **({"max_new_tokens": decoding.longest(1) - 1} if one else {}),
        "eos": decoding.eos,
        # as the rules have it, a token that ends a text is no bad word
        "bad_words": [word[0] for word in decoding.bad_words_ids if word[0] not in decoding.eos],
        "suppressed": decoding.suppress_tokens,
        "suppressed_first": decoding.begin_suppress_tokens,
        "forced_bos": [] if first is None else [first],
        "forced_eos": decoding.forced_eos_token_id,
        "vocabulary": vocabulary,
        "inputs": {name: feeds[name].tolist() for name in (*_PASSED_ON, *_OF_BEAMS) if name in feeds},
    }
