"""Write tokenizer files and graphs that transformers 4, transformers 5, Optimum and transformers.js open.

transformers 5 names the class of a tokenizer.json `TokenizersBackend`, which 4 does not have, and lists
further special tokens under `extra_special_tokens`, where 4 expects an object. All of them support
`PreTrainedTokenizerFast` and `additional_special_tokens`.

For a first step a tool creates empty caches with the heads and width that it guesses: Optimum (0.1.0) and
transformers.js (up to 3) read heads and width from the config in different ways. A model with fewer heads in
one layer, or with a separate head width, would get caches that its graph does not accept. A Reshape gives
empty caches the right shape; it does not change later ones.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.files import read_json_object, write_json
from smelt.export.graph_files import read_graph
from smelt.export.package.package_format import PackageOrigin
from smelt.generation.generating_runners import is_causal
from smelt.models.families.registry import find_family
from smelt.models.prompt_template import CHAT, PROMPT_FIELD
from smelt.models.text_rules import NO_LIMIT, max_input_length, read_prompt_template, read_text_rules
from smelt.models.text_rules import TEXT_RULES_FILE as RULES
from smelt.models.tokenizer import TOKENIZER_INFO_FILE as TOKENIZING
from smelt.models.tokenizer import read_tokenizer_info

TOKENIZER_CONFIG_FILE, TOKENIZER_JSON_FILE, ADDITIONAL_TOKENS_KEY = (
    "tokenizer_config.json",
    "tokenizer.json",
    "additional_special_tokens",
)
FAST_TOKENIZER_CLASS, BERT_TOKENIZER_CLASS = "PreTrainedTokenizerFast", "BertTokenizer"
# keys of transformers 5 only, or written by smelt
_DROPPED = ("backend", "is_local", "local_files_only")
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_NOT_COPIED = frozenset({"model.onnx_data", RULES, TOKENIZING})


def copy_tokenizer_files(source: Path, folder: Path) -> None:
    """Write the tokenizer of the exported model in `source` into `folder`.

    Raises:
        InputError: it has no tokenizer_config.json, or a file is damaged.
    """
    config, details = read_json_object(source / "config.json"), read_tokenizer_info(source)
    tokenizer_config = read_json_object(source / TOKENIZER_CONFIG_FILE)
    if not tokenizer_config:
        raise InputError(
            f"{source / TOKENIZER_CONFIG_FILE}: this tokenizer file is missing, and other libraries require"
            f" it. Copy it from the original model.",
            code="missing-file",
            file=str(source / TOKENIZER_CONFIG_FILE),
        )
    fast = (source / TOKENIZER_JSON_FILE).is_file() and details.reader != "sentencepiece"
    names = (TOKENIZER_JSON_FILE,) if fast else _slow_tokenizer_files(source)
    for name in (*names, *(path.name for path in source.glob("*.jinja"))):
        shutil.copyfile(source / name, folder / name)
    tokenizer_config = portable_tokenizer_config(tokenizer_config)
    if fast:
        tokenizer_config |= {
            "tokenizer_class": FAST_TOKENIZER_CLASS,
            "clean_up_tokenization_spaces": details.clean_up,
            "model_input_names": [
                "input_ids", *(["token_type_ids"] if details.types else []), "attention_mask",
            ],
        }  # fmt: skip
        tokenizer_config |= _special_tokens(source, tokenizer_config)
    limit = max_input_length(_LengthLimit(details.longest), config)
    tokenizer_config["model_max_length"] = min(
        int(tokenizer_config.get("model_max_length") or NO_LIMIT), limit
    )
    if is_causal(config):
        tokenizer_config["padding_side"] = "left"
        if "pad_token" not in tokenizer_config and tokenizer_config.get("eos_token"):
            tokenizer_config["pad_token"] = tokenizer_config[
                "eos_token"
            ]  # padding is masked, so any token will do
    write_json(folder / TOKENIZER_CONFIG_FILE, tokenizer_config)


def portable_tokenizer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return tokenizer_config.json with keys that all versions support."""
    portable_config = {key: value for key, value in config.items() if key not in _DROPPED}
    extra_tokens = portable_config.get("extra_special_tokens")
    if isinstance(extra_tokens, list):
        del portable_config["extra_special_tokens"]
        if extra_tokens:
            portable_config[ADDITIONAL_TOKENS_KEY] = [
                *portable_config.get(ADDITIONAL_TOKENS_KEY, []),
                *extra_tokens,
            ]
    return portable_config


def preprocessing_notes(source: Path) -> tuple[str, ...]:
    """Return notes on smelt's preprocessing of texts, which users of other libraries have to repeat."""
    rules = read_text_rules(source)
    notes = []
    if rules.lower:
        notes.append(
            "Convert texts to lower case: smelt does this before the tokenizer, other libraries do not."
        )
    if rules.prefix:
        notes.append(f"Add the prefix {rules.prefix!r} to every text: smelt adds it, other libraries do not.")
    if rules.prompt_template is not None:
        rule_text = (
            "Apply the tokenizer's chat template (`apply_chat_template` with add_generation_prompt=True and"
            " enable_thinking=False)"
            if rules.prompt_template == CHAT
            else f"Replace {PROMPT_FIELD} in {rules.prompt_template!r} by each prompt"
        )
        notes.append(f"{rule_text}: smelt does this before the tokenizer, other libraries do not.")
    return tuple(notes)


def with_prefix(source: Path, text: str) -> str:
    """Return an example text with the prefix that users of other libraries have to add."""
    rules = read_text_rules(source)
    template = read_prompt_template(source)
    if template is not None:
        return template.render(text)
    return rules.prefix + (text.lower() if rules.lower else text)


def extra_requirements(folder: Path) -> str:
    """Return the `pip install` requirements of the tokenizer in `folder`, with a leading space, or ""."""
    return " sentencepiece" if any(folder.glob("*.spm")) or any(folder.glob("*.model")) else ""


class _LengthLimit:
    def __init__(self, longest: int) -> None:
        self.model_max_length = longest


def _special_tokens(source: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens by their roles, which a tokenizer class of its own would define."""
    from smelt.models.checkpoint import load_tokenizer

    hub = load_tokenizer(source)
    special_tokens: dict[str, Any] = {}
    for role in _ROLES:
        token = getattr(hub, f"{role}_token", None)
        if token is not None:
            special_tokens[f"{role}_token"] = str(token)
    additional = [str(t) for t in hub.all_special_tokens if str(t) not in special_tokens.values()]
    if additional or ADDITIONAL_TOKENS_KEY in config:
        special_tokens[ADDITIONAL_TOKENS_KEY] = additional
    return special_tokens


def _slow_tokenizer_files(source: Path) -> list[str]:
    """Return the names of the files of a tokenizer without tokenizer.json."""
    excluded = {
        "config.json",
        "generation_config.json",
        "manifest.json",
        TOKENIZER_CONFIG_FILE,
        "modules.json",
    } | _NOT_COPIED
    ends = {".json", ".spm", ".model", ".txt"}
    names = [p.name for p in sorted(source.iterdir()) if p.is_file() and p.suffix in ends]
    return [name for name in names if name not in excluded and not name.startswith("sentence_")]


_HEADS_KEYS = ("num_attention_heads", "encoder_attention_heads", "num_heads", "n_head")
_WIDTH_KEYS = ("hidden_size", "d_model", "n_embd")


def accept_any_empty_cache(model: Any, config: Mapping[str, Any]) -> int:
    """Make every cache input of the onnx.ModelProto `model` accept any shape while it is empty, in place.

    Caches of the shape that `config` directly gives are not changed.

    Returns:
        The number of changed caches.
    """
    from onnx import helper

    heads, width = _first_setting(config, _HEADS_KEYS), _first_setting(config, _WIDTH_KEYS)
    cache_dims = (heads, width // heads) if heads and width else None
    done = any("caches.rows" in node.output for node in model.graph.node)  # a package that was read again
    unusual_caches = [
        v
        for v in model.graph.input
        if not done
        and (v.name.startswith("past_key_values.") and ".encoder." not in v.name)
        and _cache_shape(v) != cache_dims
    ]
    nodes: list[Any] = []
    for value in unusual_caches:
        nodes += _reshape_nodes(model, value)
    if unusual_caches:
        old = [*model.graph.node]
        names = {value.name: f"{value.name}.shaped" for value in unusual_caches}
        for node in old:
            for index, name in enumerate(node.input):
                node.input[index] = names.get(name, name)
        ids = "input_ids"
        rows_node = helper.make_node("Shape", [ids], ["caches.rows"], "caches.rows", start=0, end=1)
        del model.graph.node[:]
        model.graph.node.extend([rows_node, *nodes, *old])
    for value in model.graph.input:
        if value.name.startswith("past_key_values.") and _cache_shape(value) != cache_dims:
            _make_dynamic(value)
    return len(unusual_caches)


def _reshape_nodes(model: Any, value: Any) -> list[Any]:
    """Return the nodes that give `value` its heads and width."""
    import numpy as np
    from onnx import helper, numpy_helper

    name, (heads, width) = value.name, _cache_shape(value)
    for part, dim_value in (("heads", heads), ("width", width)):
        constant = numpy_helper.from_array(np.array([dim_value], np.int64), f"{name}.{part}")
        model.graph.initializer.append(constant)
    length_name, shape = f"{name}.places", f"{name}.shape"
    return [
        helper.make_node("Shape", [name], [length_name], length_name, start=2, end=3),
        helper.make_node(
            "Concat", ["caches.rows", f"{name}.heads", length_name, f"{name}.width"], [shape], shape, axis=0
        ),
        helper.make_node("Reshape", [name, shape], [f"{name}.shaped"], f"{name}.shaped", allowzero=1),
    ]


def _cache_shape(value: Any) -> tuple[int, int]:
    """Return heads and width of a cache [B, H, P, d]."""
    dims = value.type.tensor_type.shape.dim
    return dims[1].dim_value, dims[3].dim_value


def _make_dynamic(value: Any) -> None:
    """Make heads and width of `value` dynamic."""
    dims = value.type.tensor_type.shape.dim
    for axis, dim_name in ((1, "heads"), (3, "width")):
        dims[axis].dim_param = f"{dim_name}_of_{value.name}"


def require_cache_per_layer(source: Path, graph: str, tool: str) -> None:
    """Require that the graph `graph` in `source` has a cache for each layer of the config.

    A tool that creates the first caches uses the config. A model without this graph needs none.

    Raises:
        InputError: attention blocks were removed (`drop-layers`), and their caches with them.
    """
    config = read_json_object(source / "config.json")
    family = find_family(config)
    counts = [s.num_layers(config) for s in family.stacks(config) if s.causal] if family else []
    path = source / f"{graph}.onnx"
    if not counts or counts[0] is None or not path.is_file():
        return
    names = [i.name.split(".") for i in read_graph(path, values=False).graph.input]
    layer_counts = Counter(".".join(n[2:]) for n in names if n[0] == "past_key_values")
    for kind, num_caches in sorted(layer_counts.items()):
        if num_caches != counts[0]:
            raise InputError(
                f"its decoder has caches ({kind}) for only {num_caches} of {counts[0]} layers, because"
                f" 'drop-layers' removed attention blocks, and {tool} creates one for each layer of"
                " config.json.",
                code="unsupported-structure",
            )


def require_float_caches(source: Path, graph: str, tool: str) -> None:
    """Require that the caches of the graph `graph` in `source` are not int8.

    A tool that creates the first caches creates float ones. A model without this graph needs none.

    Raises:
        InputError: they are int8.
    """
    from smelt.export.kv_cache import has_int8_caches

    path = source / f"{graph}.onnx"
    if path.is_file() and has_int8_caches(read_graph(path, values=False)):
        raise InputError(
            f"its caches are int8 (`onnx: {{kv_cache: int8}}`), and {tool} creates float caches. Export it"
            " with kv_cache: float for this format.",
            code="unsupported-kv-cache",
        )


def _first_setting(config: Mapping[str, Any], words: tuple[str, ...]) -> int | None:
    return next((config[key] for key in words if isinstance(config.get(key), int)), None)


def generate_arguments(origin: PackageOrigin) -> str:
    """Return the generation settings of the scores as arguments of `generate`, with a leading comma."""
    supported_arguments = {
        "num_beams",
        "max_new_tokens",
        "min_new_tokens",
        "length_penalty",
        "no_repeat_ngram_size",
    }
    arguments = {k: v for k, v in origin.generation.items() if k in supported_arguments}
    return "".join(f", {argument_name}={value!r}" for argument_name, value in arguments.items())
