"""Write infer.json: the settings with which infer.py answers as the artifact was scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import Artifact, default_threads
from smelt.core.data import IMAGE_CLASSIFICATION, SENTENCE_SIMILARITY
from smelt.core.errors import InputError
from smelt.core.files import read_json_object
from smelt.core.labels import class_names, problem_type
from smelt.runtime.images.image_processor import read_processor

if TYPE_CHECKING:
    from smelt.runtime.generate.generation_config import GenerationConfig

_CLASSIFIES = "text-classification"
_GRAPH_INPUTS = (
    "eos_token_ids",
    "pad_token_id",
    "decoder_start_token_id",
    "text_rules",
    "no_repeat_ngram_size",
)
_BEAM_SETTINGS = ("num_beams", "length_penalty", "early_stopping", "never_stop_early", "renormalize_logits")
_SAMPLING_SETTINGS = ("do_sample", "temperature", "top_k", "top_p", "seed")


def infer_settings(artifact: Artifact, generation: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return infer.json, and notes for the README.

    Args:
        artifact: an export for ONNX Runtime on the CPU.
        generation: the recipe's `score.generation`.

    Raises:
        InputError: the graphs do not support the model's generation settings.
    """
    config = read_json_object(artifact.path / "config.json")
    task = artifact.manifest.task
    made: dict[str, Any] = {"task": task, "threads": default_threads(artifact.manifest)}
    notes: list[str] = []
    if task == IMAGE_CLASSIFICATION:
        return made | {"images": image_settings(artifact)} | _class_settings(config), notes
    limit, tokenizer = _tokenizer_settings(artifact, config)
    made["tokenizer"] = tokenizer
    if task == _CLASSIFIES:
        made |= _class_settings(config)
    elif task == SENTENCE_SIMILARITY:
        from smelt.families.registry import find_family

        family = find_family(config)
        made["width"] = int(config[family.hidden_size_key]) if family else 0
    else:
        made["generation"], notes = _generation_settings(artifact, config, generation)
        if not config.get("is_encoder_decoder"):  # the requested number of new tokens limits a prompt
            made["generation"]["limit"], tokenizer["limit"] = limit, None
    return made, notes


def _class_settings(config: dict[str, Any]) -> dict[str, Any]:
    return {"labels": class_names(config), "problem": problem_type(config)}


def image_settings(artifact: Artifact) -> dict[str, Any]:
    """Return the preprocessing of images.

    Raises:
        InputError: preprocessor_config.json is missing, or smelt does not support its settings.
    """
    return asdict(read_processor(artifact.path))


def _tokenizer_settings(artifact: Artifact, config: dict[str, Any]) -> tuple[int | None, dict[str, Any]]:
    """Return the maximum number of tokens of a text, None for no limit, and the tokenizer settings."""
    from smelt.runtime.generate.prompt_batches import padding_token
    from smelt.runtime.text.length_limits import NO_LIMIT, max_input_length
    from smelt.runtime.text.open_tokenizer import open_tokenizer
    from smelt.runtime.text.rust_tokenizer import CLEANUP_REPLACEMENTS
    from smelt.runtime.text.text_preprocessing import read_text_rules
    from smelt.runtime.text.tokenizer_info import read_tokenizer_info

    said, rules = read_tokenizer_info(artifact.path), read_text_rules(artifact.path)
    words = open_tokenizer(artifact.path)
    limit: int | None = max_input_length(words, config)
    limit = None if limit is None or limit >= NO_LIMIT else limit
    left = not config.get("is_encoder_decoder") and artifact.manifest.task == "language-modeling"
    pad = padding_token(words) if left else words.pad_token_id or 0
    kept = said.model_dump(exclude={"reason", "longest", "clean_up"})
    more = {
        "replace": CLEANUP_REPLACEMENTS if said.clean_up else [],
        "prefix": rules.prefix,
        "lower": rules.lower,
    }
    return limit, {**kept, "pad": pad, "limit": limit, **more}


def _generation_settings(
    artifact: Artifact, config: dict[str, Any], wishes: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the complete generation settings, and notes about them."""
    from smelt.runtime.generate.generation_config import resolve_generation
    from smelt.runtime.generate.graph_generation import graph_supports
    from smelt.runtime.generate.settings import GenerationSettings
    from smelt.runtime.runner import read_model_files

    notes = []
    if wishes.get("do_sample"):
        notes = ["The recipe draws tokens at random; infer.py uses the most likely token of each step."]
        wishes = {name: value for name, value in wishes.items() if name not in _SAMPLING_SETTINGS}
    model: Any = read_model_files(artifact.path)
    decoding = resolve_generation(GenerationSettings(**wishes), model)
    if not graph_supports(decoding):
        raise InputError(
            "its generation settings contain bad_words_ids of several tokens, or remove_invalid_values. The"
            " generation graph supports neither. Remove them from the recipe or generation_config.json.",
            code="unsupported-generation-setting",
        )
    return search_settings(decoding, int(config.get("decoder_vocab_size") or config["vocab_size"])), notes


def search_settings(decoding: GenerationConfig, vocabulary: int) -> dict[str, Any]:
    """Return the search settings: rules that infer.py builds, and inputs that it passes to the graph."""
    from smelt.runtime.backends.backend import BEAM_SEARCH_GRAPH, GREEDY_GRAPH
    from smelt.runtime.generate.graph_generation import generation_feeds

    feeds = generation_feeds(decoding, 1, vocabulary)
    one = decoding.start is not None  # the prompt is one token, so the longest output is known
    kept = ("max_new_tokens", "max_length", "min_new_tokens", "min_length", "positions", "repetition_penalty")
    first = decoding.forced_bos_token_id
    return {
        "graph": f"{BEAM_SEARCH_GRAPH if decoding.num_beams > 1 else GREEDY_GRAPH}.onnx",
        **{name: getattr(decoding, name) for name in kept},
        **({"max_new_tokens": decoding.max_total_length(1) - 1} if one else {}),
        "eos": decoding.eos,
        # as in the rules, an end token is not a bad word
        "bad_words": [word[0] for word in decoding.bad_words_ids if word[0] not in decoding.eos],
        "suppressed": decoding.suppress_tokens,
        "suppressed_first": decoding.begin_suppress_tokens,
        "forced_bos": [] if first is None else [first],
        "forced_eos": decoding.forced_eos_token_id,
        "vocabulary": vocabulary,
        "inputs": {name: feeds[name].tolist() for name in (*_GRAPH_INPUTS, *_BEAM_SETTINGS) if name in feeds},
    }
