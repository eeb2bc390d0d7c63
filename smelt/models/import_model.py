"""Import a user's model as the first artifact of a run, with its license.

The license is read from the front matter of the model card, or from a license file.

A GPTQ or AWQ checkpoint is imported as scheme int4, with exactly its weights, scales and zero points. A
group of the checkpoint becomes one group, or several with the same scale where smelt has no group that
large; where all zero points are 8, none are stored. Activations are int8 blocks, as in every int4 layer
(accuracy level 4). `int4_packing.py` has the layouts.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from smelt.core.errors import InputError
from smelt.core.files import read_json_object, write_json
from smelt.core.messages import Message, warning, with_article
from smelt.data.labels import SINGLE_LABEL, ProblemType
from smelt.models.checkpoint import (
    add_model_prefix,
    load_model,
    read_tensors,
    rename_tensor,
    require_base_weights,
    save_model,
)
from smelt.models.edits import Edit, apply_edits, read_edits, write_edits
from smelt.models.empty_model import empty_model, load_config, silence_transformers
from smelt.models.families.registry import FAMILIES, lacks_head
from smelt.models.int4_packing import UnpackedInt4, unpack_awq, unpack_gptq
from smelt.models.quantization_config import (
    PACKED_TENSORS,
    QUANTIZATION_CONFIG_KEY,
    QuantizationConfig,
    compatible_group_size,
    missing_tensor_error,
    new_head_message,
    parse_quantization_config,
    quantized_layer_names,
    require_layer_tensors,
)
from smelt.models.text_rules import (
    POOLING_FOLDER,
    PROMPTS_FILE,
    SENTENCE_FILES,
    SentenceRules,
    write_sentence_rules,
)
from smelt.models.weight_files import (
    WEIGHTS_CONFIG_KEY,
    WEIGHTS_FILE,
    is_unused_tensor,
    source_files,
    weight_tensors,
)
from smelt.quantization.groupwise import GROUP_SIZE, num_groups, split_into_groups
from smelt.quantization.scheme import UnpackedWeights
from smelt.quantization.schemes.registry import CHECKPOINT_SCHEME, default_options, find_scheme

_MIDDLE = 8  # the zero point of symmetric 4-bit weights


def import_quantized(
    src: Path, out: Path, coding: QuantizationConfig, extra_files: list[Path]
) -> list[Message]:
    """Write the model of `src` into `out`, its quantized weights unchanged; return warnings.

    Args:
        src: the checkpoint.
        out: a folder.
        coding: its quantization config.
        extra_files: the files of `src` that are copied unchanged.

    Raises:
        InputError: tensors are missing, do not match the config, or cannot be represented in int4.
    """
    for path in extra_files:
        shutil.copyfile(path, out / path.name)
    config = read_json_object(src / "config.json")
    removed_keys = (
        QUANTIZATION_CONFIG_KEY,
        WEIGHTS_CONFIG_KEY,
    )  # the weights are in one file, under its usual name
    write_json(
        out / "config.json", {name: value for name, value in config.items() if name not in removed_keys}
    )
    model, _ = empty_model(out)
    tensors = _CheckpointTensors(src)
    layers = dict.fromkeys(quantized_layer_names(src, tensors.places, coding))
    stored_tensors: dict[str, Tensor] = {}
    edits: list[Edit] = []
    for name in layers:
        layer_name = _layer_name(model, name, src)
        layer_tensors, options = _packed_tensors(tensors, name, model.get_submodule(layer_name), coding)
        stored_tensors |= {
            f"{layer_name}.matrix.{suffix}": tensor for suffix, tensor in layer_tensors.items()
        }
        edits.append({"op": "quantize", "module": layer_name, "scheme": CHECKPOINT_SCHEME, **options})
    parts = {f"{name}.{suffix}" for name in layers for suffix in PACKED_TENSORS}
    for name in tensors.places.keys() - parts:
        if not _is_zero_bias(model, name, layers, tensors):
            stored_tensors[name] = tensors.read(name)
    save_file(dict(sorted(stored_tensors.items())), out / WEIGHTS_FILE, metadata={"format": "pt"})
    write_edits(out, edits)
    try:
        load_model(out)  # verifies all tensors
    except InputError as error:
        raise InputError(str(error).replace(str(out), str(src)), code=error.code) from error
    return [
        warning(
            "already-quantized",
            f"The model is already quantized by {coding.method}: {len(layers)} layers are imported as scheme"
            f" {CHECKPOINT_SCHEME}. The baseline is this model, not the one before quantization.",
        )
    ]


class _CheckpointTensors:
    """The tensors of a checkpoint, read one at a time."""

    def __init__(self, src: Path) -> None:
        self.src = src
        entries = list(weight_tensors(src))
        self.places = {name: path for path, name, _ in entries}
        self.entries = {name: entry for _, name, entry in entries}

    def read(self, name: str) -> Tensor:
        """Return a tensor in its own type.

        Raises:
            InputError: it is missing, or its file is damaged.
        """
        if name not in self.places:
            raise missing_tensor_error(self.src, name)
        try:
            with safe_open(self.places[name], framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{self.places[name]}: not a readable safetensors file: {error}", code="damaged-weights"
            ) from error
        return tensor


def _layer_name(model: Any, name: str, src: Path) -> str:
    """Return the dotted name of the linear layer with the name `name` in the file."""
    for module_name in (name, f"{model.base_model_prefix}.{name}"):
        try:
            module = model.get_submodule(module_name)
        except AttributeError:
            continue
        if isinstance(module, nn.Linear):
            return module_name
    raise InputError(
        f"{src}: '{name}.qweight' belongs to a layer that a {type(model).__name__} does not have.",
        code="unknown-layer",
    )


def _is_zero_bias(model: Any, name: str, coded: Mapping[str, None], tensors: _CheckpointTensors) -> bool:
    """Return whether a tensor is the zero bias that some tools store for layers without a bias."""
    layer = name.removesuffix(".bias")
    if layer == name or layer not in coded:
        return False
    module = model.get_submodule(_layer_name(model, layer, tensors.src))
    return module.bias is None and not bool(tensors.read(name).any())


def _packed_tensors(
    tensors: _CheckpointTensors, name: str, linear: nn.Linear, coding: QuantizationConfig
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of the layer `name` as its scheme stores them, and the scheme's options."""
    layer = _read_layer(tensors, name, linear, coding)
    scheme, width = find_scheme(CHECKPOINT_SCHEME), linear.in_features
    group = min(coding.group_size or width, width)
    size = compatible_group_size(tensors.src, name, coding, width)
    count = num_groups(width, size)
    zeros, scales = (
        tensor_name.repeat_interleave(-(-group // size), dim=1)[:, :count]
        for tensor_name in (layer.zeros, layer.scales)
    )
    symmetric = bool((zeros == _MIDDLE).all())
    options = default_options(scheme) | {GROUP_SIZE.name: size, "symmetric": symmetric}
    q_weight = split_into_groups(layer.codes.contiguous(), size)
    if pad := count * size - width:  # the padding of the last group is zero
        q_weight[:, -1, -pad:] = zeros[:, -1:].to(q_weight.dtype)
    grid = {"scales": scales.contiguous().float()}
    grid |= {} if symmetric else {"zeros": zeros.to(torch.uint8)}
    packed = scheme.pack(UnpackedWeights(q_weight, grid), options)
    types = scheme.stored_tensors(linear.out_features, width, options)
    stored_tensors = {
        tensor_name: tensor.to(
            getattr(torch, types[tensor_name].file_dtype or types[tensor_name].dtype)
        ).contiguous()
        for tensor_name, tensor in packed.items()
    }
    return stored_tensors, dict(options)


def _read_layer(
    tensors: _CheckpointTensors, name: str, linear: nn.Linear, coding: QuantizationConfig
) -> UnpackedInt4:
    """Return the tensors of a layer, checked for values that cannot be imported."""
    out_features, width = linear.out_features, linear.in_features
    require_layer_tensors(tensors.src, name, tensors.entries, coding, width, out_features)
    qweight, qzeros, scales = (tensors.read(f"{name}.{suffix}") for suffix in PACKED_TENSORS[:3])
    if coding.act_order or f"{name}.g_idx" in tensors.places:
        _require_contiguous_groups(tensors, name, width, min(coding.group_size or width, width))
    unpacked = (
        unpack_gptq(qweight, qzeros, scales, coding.zero_point_offset)
        if coding.method == "gptq"
        else unpack_awq(qweight, qzeros, scales)
    )
    if int(unpacked.zeros.max()) > 15:
        raise InputError(
            f"{tensors.src}: '{name}.qzeros' has a zero point of 16, which 4 bits cannot represent."
            " The checkpoint was read as 'gptq'. Either it is 'gptq_v2' (checkpoint_format), or"
            " it has a zero point of 0, which 'gptq' cannot store. Save it again as gptq_v2.",
            code="zero-point-out-of-range",
        )
    odd = int(unpacked.zeros.min()) if coding.symmetric and coding.method == "gptq" else _MIDDLE
    if abs(odd - _MIDDLE) == 1 and bool((unpacked.zeros == odd).all()):
        raise InputError(
            f"{tensors.src}: '{name}.qzeros': {QUANTIZATION_CONFIG_KEY} has sym: true, so every zero point"
            f" must be {_MIDDLE}, but these are {odd}. Probably checkpoint_format is 'gptq' where the file is"
            " 'gptq_v2', or the reverse. Set the format that its tool wrote.",
            code="wrong-checkpoint-format",
        )
    float16_scales = scales.to(torch.float16)
    if not bool(float16_scales.isfinite().all()) or not float16_scales.to(scales.dtype).equal(scales):
        raise InputError(
            f"{tensors.src}: '{name}.scales' ({scales.dtype}) has values that float16 cannot represent"
            " exactly, or that are not finite, so it cannot be imported. Start from the float model.",
            code="inexact-scales",
        )
    return unpacked


def _require_contiguous_groups(tensors: _CheckpointTensors, name: str, width: int, group: int) -> None:
    """Reject groups whose inputs are not contiguous."""
    index = tensors.read(f"{name}.g_idx").long()
    if not index.equal(torch.arange(width) // group):
        raise InputError(
            f"{tensors.src}: '{name}.g_idx': the inputs of a group are not contiguous (desc_act, act-order),"
            " which no fast operator supports. Use a checkpoint with desc_act: false, or start from the"
            f" float model: quantize: {{scheme: {CHECKPOINT_SCHEME}, method: gptq}}.",
            code="unsupported-group-order",
        )


def import_model(
    src: Path,
    out: Path,
    labels: list[str] | None = None,
    seed: int = 0,
    problem: ProblemType | None = None,
    sentences: SentenceRules | None = None,
    auto_class: str = "AutoModelForSequenceClassification",
) -> list[Message]:
    """Copy the Hugging Face model folder `src` into `out`, as the first artifact of a run.

    Where `labels` are given and the checkpoint has another head than transformers' `auto_class`, or none, it
    gets a new one, drawn with `seed`. The `problem` type of a classifier is written to its config
    if missing, for all later steps. Quantized weights of a GPTQ or AWQ checkpoint become those of its layers.
    The `sentences` rules of a sentence embedder are stored for all later steps. Returns warnings.

    Raises:
        InputError: quantized weights cannot be imported exactly.
    """
    config = load_config(src)
    architecture = (config.architectures or [""])[0]
    coding = parse_quantization_config(config.to_dict())
    names, is_encoder_decoder = config.architectures, config.is_encoder_decoder
    is_headless = lacks_head({"architectures": names, "is_encoder_decoder": is_encoder_decoder})
    if coding is not None and (is_headless or _needs_new_head(labels, architecture, auto_class)):
        raise InputError(f"{src}: {new_head_message(coding)}", code="already-quantized")
    if labels is not None and _needs_new_head(labels, architecture, auto_class):
        return _with_new_head(src, out, labels, auto_class, seed, problem)
    if is_headless:
        return add_tied_head(src, out)
    notes: list[Message] = []
    if coding is not None:
        other_files = [path for path in source_files(src) if path.suffix != ".safetensors"]
        notes = import_quantized(
            src, out, coding, [path for path in other_files if path.name != "config.json"]
        )
    elif _has_older_names(src, config.model_type):
        model, edits = load_model(src)
        return save_model(model, edits, out, src)
    else:
        for path in source_files(src):
            shutil.copyfile(path, out / path.name)
    if problem not in (None, SINGLE_LABEL) and config.problem_type is None:
        values = read_json_object(out / "config.json")
        write_json(out / "config.json", values | {"problem_type": problem})
    if sentences is not None:
        configure_embedder(out, sentences)
    return notes


def _needs_new_head(labels: list[str] | None, architecture: str, auto_class: str) -> bool:
    """Return whether labels are given and the model has no head for them."""
    return labels is not None and not architecture.endswith(auto_class.removeprefix("AutoModel"))


def _has_older_names(src: Path, kind: str) -> bool:
    """Return whether tensors of `src` have the former names of the family `kind`."""
    family_info = FAMILIES.get(kind)
    renamed_pairs = family_info.renamed_tensors if family_info else ()
    return bool(renamed_pairs) and any(
        rename_tensor(name, renamed_pairs) != name for _, name, _ in weight_tensors(src)
    )


def configure_embedder(folder: Path, rules: SentenceRules) -> None:
    """Store in `folder` the `rules` by which all readers make vectors of texts, and their maximum length."""
    config = read_json_object(folder / "config.json")
    write_sentence_rules(folder, rules, FAMILIES[str(config["model_type"])].hidden_size(config) or 0)
    if rules.max_length is not None:  # sentence-transformers writes it there too
        path = folder / "tokenizer_config.json"
        write_json(path, read_json_object(path) | {"model_max_length": rules.max_length})


def _with_new_head(
    src: Path, out: Path, labels: list[str], auto_class: str, seed: int, problem: ProblemType | None
) -> list[Message]:
    names = dict(enumerate(labels))
    head_config = {
        "num_labels": len(labels),
        "id2label": names,
        "label2id": {v: k for k, v in names.items()},
        "problem_type": problem,
    }
    torch.manual_seed(seed)
    edits = _edits_without_head(src)
    if edits:
        model = _edited_model_with_new_head(src, auto_class, head_config, edits)
    else:
        with silence_transformers():
            model, info = getattr(transformers, auto_class).from_pretrained(
                src,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # of its previous head; others raise an error below
                **head_config,
            )
        require_base_weights(model, info, src, new_head=True)
    notes = save_model(model, edits, out, src)
    for name in (*SENTENCE_FILES, PROMPTS_FILE):  # it is no longer a sentence embedder
        (out / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # missing, or not empty
        (out / POOLING_FOLDER).rmdir()
    return [
        *notes,
        warning(
            "new-classifier",
            f"The checkpoint has no head of {auto_class}. An untrained one with {len(labels)}"
            f" output{'s' * (len(labels) != 1)} was added; train it before you use the scores.",
        ),
    ]


def _edits_without_head(src: Path) -> list[Edit]:
    """Return the edits of the model in `src` but those of its head."""
    family = str(load_config(src).model_type)

    def is_head(name: str) -> bool:
        return is_unused_tensor(family, f"{name}.weight", new_head=True)

    return [edit for edit in read_edits(src) if not is_head(edit["module"])]


def _edited_model_with_new_head(
    src: Path, auto_class: str, head_config: Mapping[str, Any], edits: list[Edit]
) -> Any:
    """Return the model of `src` with its `edits` and a random head, whose config has `head_config`."""
    config = load_config(src)
    config.update(head_config)
    model = getattr(transformers, auto_class).from_config(
        config, dtype=torch.float32, trust_remote_code=False
    )
    apply_edits(model, edits)
    tensors = add_model_prefix(model, read_tensors(src))
    unexpected = model.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
    loaded = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in tensors}
    missing = [name for name, p in model.named_parameters() if id(p) not in loaded]
    info = {"unexpected_keys": unexpected, "missing_keys": missing, "mismatched_keys": ()}
    require_base_weights(model, info, src, new_head=True)
    return model.eval()


_CARD = "README.md"
_FILES = re.compile(r"(licen[sc]e|copying)(\.(txt|md|rst))?", re.IGNORECASE)
_MAX_BYTES = 1_000_000  # bytes that are read
_MAX_LINE_LENGTH = 100


def read_license(folder: Path) -> str | None:
    """Return the license of the model in `folder` in one line; None where it is not stated."""
    return _license_from_card(folder / _CARD) or _license_from_file(folder)


def _license_from_card(path: Path) -> str | None:
    """Return the `license` of a model card, with its name or link where it is `other`."""
    front_matter = re.match(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", _read(path), flags=re.S)
    if front_matter is None:
        return None
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        values = YAML(typ="safe", pure=True).load(front_matter[1])
    except (YAMLError, RecursionError, ValueError):
        return None
    values = values if isinstance(values, dict) else {}
    fields = [values.get(key) for key in ("license", "license_name", "license_link")]
    licenses = [str(w) for field in fields if field for w in (field if isinstance(field, list) else [field])]
    return _single_line(f"{', '.join(licenses)} (its model card)") if licenses else None


def _license_from_file(folder: Path) -> str | None:
    """Return the first words of a license file, which are its name."""
    try:
        names = sorted(path for path in folder.iterdir() if _FILES.fullmatch(path.name) and path.is_file())
    except OSError:
        return None
    for path in names:
        first = next((line.strip(" #*\t") for line in _read(path).splitlines() if line.strip()), "")
        if first:
            return _single_line(f"{first} (its file {path.name})")
    return None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return stream.read(_MAX_BYTES).decode("utf-8", errors="replace").replace("\r\n", "\n")
    except OSError:
        return ""


def _single_line(text: str) -> str:
    """Return `text` in one line of limited length; it is untrusted."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _MAX_LINE_LENGTH else line[: _MAX_LINE_LENGTH - 3] + "..."


def add_tied_head(src: Path, out: Path) -> list[Message]:
    """Write the model of `src` into `out` with its word embedding as output layer; return a note.

    Raises:
        InputError: the config requires an untied output layer, which the checkpoint does not have, or its
            weights and its config do not match.
    """
    with silence_transformers():
        model, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(
            src,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # raises an error below
        )
    name = model.config.model_type
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        raise InputError(
            f"{src}: {with_article(name)} model without an output layer, and its config does not tie"
            " the output layer to the token embedding (tie_word_embeddings: false). Start from a"
            " checkpoint that generates text.",
            code="missing-output-layer",
        )
    require_base_weights(model, info, src)
    notes = save_model(model, [], out, src)
    return [
        *notes,
        warning(
            "tied-output-head",
            "The checkpoint has no output layer; the token embedding is used, as set in its config.",
        ),
    ]
