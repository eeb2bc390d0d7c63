"""Read and write torch artifacts: Hugging Face config, structure edits, safetensors, tokenizer.

Tensors are assigned to a model's parameters by name, and shared ones are tied. Weights must match the config:
no tensor is ignored, and none is initialized at random.

A model's text rules, with the first token of its target language, are stored in its folder.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationConfig

from smelt.core.errors import InputError
from smelt.core.files import is_artifact_file, read_json_object, write_json
from smelt.core.messages import Message
from smelt.core.system import require_memory
from smelt.models.computed_weights import compute_weights
from smelt.models.edits import Edit, add_mask_edits, write_edits
from smelt.models.empty_model import (
    cast_to_stored,
    config_dtype,
    empty_model,
    load_config,
    quantized_dtypes,
    silence_transformers,
    stored_dtypes,
    transpose_conv1d_tensors,
)
from smelt.models.families.registry import family_of, output_modules
from smelt.models.prompt_template import CHAT
from smelt.models.sentence_model import as_bare_encoder
from smelt.models.text_rules import (
    MODULES_FILE,
    SENTENCE_CONFIG_FILE,
    SENTENCE_FILES,
    TEXT_RULES_FILE,
    TextRules,
    apply_text_rules,
    is_sentence_model,
    language_token_id,
    read_prompt_template,
    read_text_rules,
)
from smelt.models.text_rules import SHORTLIST_FILE as SHORTLIST
from smelt.models.weight_files import (
    TOKENIZER_SUFFIXES,
    WEIGHTS_FILE,
    WEIGHTS_INDEX_FILE,
    find_weights,
    has_weights,
    is_unused_tensor,
    oversized_setting,
    value_count,
    weight_tensors,
)
from smelt.stage import StoredDtype


def require_no_unexpected(
    family: str, unexpected: Iterable[str], folder: Path, new_head: bool = False, embeds: bool = False
) -> None:
    """Require that no needed tensor is ignored because the model has no parameter for it.

    Args:
        family: the config's model_type.
        unexpected: names of the tensors.
        folder: of the tensors, for the message.
        new_head: the model gets another head than the checkpoint was trained with.
        embeds: the model is a sentence embedder.

    Raises:
        InputError: a tensor is not one of those that models can ignore.
    """
    no_pooler = embeds or new_head  # a head of tokens uses none
    unmatched = sorted(name for name in unexpected if not is_unused_tensor(family, name, new_head, no_pooler))
    if unmatched:
        omitted = f" and {len(unmatched) - 5:,} more" if len(unmatched) > 5 else ""
        names = ", ".join(name[:120] for name in unmatched[:5])
        raise InputError(
            f"{folder}: the config has no parameters for the tensors {names}{omitted}. The files belong"
            " to another model, or contain parts that smelt does not support.",
            code="unknown-tensor",
        )


def require_no_missing(missing: Iterable[str], folder: Path) -> None:
    """Require that no weight is `missing`; transformers would initialize it at random.

    Raises:
        InputError: one is.
    """
    names = sorted(missing)
    if names:
        omitted = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
        raise InputError(
            f"{folder}: missing weights: {', '.join(names[:5])}{omitted}. Copy or download the model again.",
            code="missing-tensor",
        )


def require_base_weights(model: Any, info: Mapping[str, Any], folder: Path, new_head: bool = False) -> None:
    """Require that all but the head of a model was read from a checkpoint with another or no head.

    Args:
        model: with its new head.
        info: the result of `from_pretrained(..., output_loading_info=True)`.
        folder: the checkpoint, for the message.
        new_head: the model gets another head than the checkpoint was trained with.

    Raises:
        InputError: a tensor has no parameter, is missing, or has another shape.
    """
    family = family_of(model)
    biases = {family.logits_bias} if family else set()
    heads = tuple(f"{module}." for module in output_modules(model))
    require_no_unexpected(model.config.model_type, info["unexpected_keys"], folder, new_head)
    missing = (name for name in info["missing_keys"] if name not in biases and not name.startswith(heads))
    require_no_missing(missing, folder)
    for name, shape, expected in sorted(info["mismatched_keys"], key=lambda odd: str(odd[0])):
        if not (new_head and name.startswith(heads)):
            raise InputError(
                f"{folder}: the weights do not match the config: the tensor '{name}' is {list(shape)}, but"
                f" the model expects {list(expected)}.",
                code="shape-mismatch",
            )


_T = TypeVar("_T")
_NORMS = {"gamma": "LayerNorm.weight", "beta": "LayerNorm.bias"}


def add_model_prefix(model: Any, tensors: dict[str, _T]) -> dict[str, _T]:
    """Return `tensors`, or other values by names in a checkpoint, with the names of the model.

    A checkpoint that was saved without its head (such as the first GPT-2) has names relative to the body; the
    first BERTs call the weight and bias of a norm gamma and beta; a family defines its older names.
    """
    family = family_of(model)
    tensors = {
        rename_tensor(
            re.sub(r"LayerNorm\.(gamma|beta)$", lambda match: _NORMS[match[1]], n),
            family.renamed_tensors if family else (),
        ): t
        for n, t in tensors.items()
    }
    prefix = f"{model.base_model_prefix}."
    if prefix == "." or any(name.startswith(prefix) for name in tensors):
        return tensors
    inner_names = {name.removeprefix(prefix) for name in model.state_dict() if name.startswith(prefix)}
    return {prefix + n if n in inner_names else n: t for n, t in tensors.items()}


def rename_tensor(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Return the name of a tensor with each pattern of `pairs` replaced, in order."""
    for pattern, replacement in pairs:
        name = re.sub(pattern, replacement, name)
    return name


def load_weights(model: Any, tensors: dict[str, Tensor], folder: Path) -> None:
    """Assign `tensors`, tie shared weights, and compute the ones that are in no file (fixed positions).

    Tensors on the meta device are those of weights that are read later.
    """
    try:
        load_result = model.load_state_dict(tensors, strict=False, assign=True)
    except RuntimeError as error:
        problem = _shape_mismatch(model, tensors) or str(error)[:500]
        raise InputError(
            f"{folder}: the weights do not match the config: {problem}", code="shape-mismatch"
        ) from error
    require_no_unexpected(
        model.config.model_type, load_result.unexpected_keys, folder, embeds=is_sentence_model(model)
    )
    _untie_different_weights(model, tensors)
    _tie_weights(model)
    read_later = {
        id(p)
        for n, p in model.named_parameters(remove_duplicate=False)
        if n in tensors and tensors[n].is_meta
    }
    ignorable = set(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    for module_name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            means = f"{module_name}.running_mean"
            require_no_missing([means] if means in load_result.missing_keys else [], folder)
        own_parameters = module.named_parameters(recurse=False)
        empty = [n for n, p in own_parameters if p.is_meta and id(p) not in read_later]
        if not empty:
            continue
        names = [f"{module_name}.{n}".removeprefix(".") for n in empty]
        require_no_missing((n for n in names if n not in ignorable), folder)
        compute_weights(model, module)


def _shape_mismatch(model: Any, tensors: dict[str, Tensor]) -> str | None:
    """Return the error text for the first tensor with another shape than its parameter, None if all match."""
    for name, parameter in model.state_dict().items():
        if name in tensors and tensors[name].shape != parameter.shape:
            return (
                f"the tensor '{name}' is {list(tensors[name].shape)}, but the model expects"
                f" {list(parameter.shape)}."
            )
    return None


def _untie_different_weights(model: Any, tensors: dict[str, Tensor]) -> None:
    """Remove the ties of weights that the file has twice, with different values, as transformers does.

    T5 v1.1 has an untied output layer while its config, as transformers reads it, ties everything.
    """
    tied_weights = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in list(tied_weights.items()):
        if target in tensors and source in tensors and not torch.equal(tensors[target], tensors[source]):
            del tied_weights[target]


def _tie_weights(model: Any) -> None:
    """Tie tied parameters again, wherever both are still plain parameters."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied_weights = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in tied_weights.items():  # a file may have the tensor under any of its names
        if target in parameters and source in parameters and parameters[source].is_meta:
            parent, _, name = source.rpartition(".")
            setattr(model.get_submodule(parent), name, parameters[target])
            parameters[source] = parameters[target]
    for target, source in tied_weights.items():
        if target in parameters and source in parameters:
            parent, _, name = target.rpartition(".")
            setattr(model.get_submodule(parent), name, model.get_parameter(source))


_NOT_TOKENIZER = {
    "adapter_config.json",  # of peft: transformers would read its base model instead
    "config.json",
    "generation_config.json",
    "structure.json",
    "manifest.json",
    WEIGHTS_INDEX_FILE,
    MODULES_FILE,
    SENTENCE_CONFIG_FILE,
}


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer stored in `folder`, with the prefix and languages stored next to it.

    Raises:
        InputError: its files are missing or do not match.
    """
    try:
        with silence_transformers():
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # tokenizers raises bare Exceptions from Rust: the file cannot be read
        raise InputError(
            f"{folder}: the tokenizer cannot be read: {error}", code="damaged-tokenizer"
        ) from error
    apply_text_rules(tokenizer, read_text_rules(folder))
    tokenizer.smelt_prompts = read_prompt_template(folder)
    return tokenizer


def load_model(folder: Path, widen: bool = True) -> tuple[Any, list[Edit]]:
    """Build the model on the meta device, apply its edits, then read its tensors.

    Returns the model (float32, CPU, eval mode) and the edits, to which a stage appends its own.

    Args:
        folder: of the model.
        widen: False leaves 16-bit matrices of linear layers and embeddings in their file, which is mapped
            into memory, and widens them at each use. The outputs are the same; for inference only.

    Raises:
        InputError: weights are missing, damaged, or do not match the config and the edits.
        RunError: there is not enough memory for the widened weights.
    """
    if (problem := oversized_setting(folder, read_json_object(folder / "config.json"))) is not None:
        raise InputError(problem, code="config-exceeds-weights")
    if widen:
        require_memory(
            widened_bytes(folder),
            f"Loading {folder} in float32",
            "Make the model smaller first by stages that process it block by block"
            " (docs/measurements/large-models.md), or use a machine with more memory.",
        )
    model, edits = empty_model(folder)
    tensors = read_tensors(folder, widen)
    load_weights(model, transpose_conv1d_tensors(model, add_model_prefix(model, tensors)), folder)
    if not widen:
        _widen_on_use(model)
    model.eval()
    return model, edits


def count_stored_parameters(model: Any) -> int:
    """Return the number of stored parameters of a float `model`, as `count_parameters` of its files.

    Buffers count if they are stored (a bias of logits); fixed position tables are not.
    """
    fixed = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    kind, tensors = model.config.model_type, model.state_dict(keep_vars=True).items()
    stored = {id(v): v.numel() for n, v in tensors if n not in fixed and not is_unused_tensor(kind, n)}
    return sum(stored.values())


def widened_bytes(folder: Path) -> int:
    """Return the bytes of the 16-bit tensors of the model in `folder` as float32."""
    return sum(
        4 * value_count(entry)
        for _, _, entry in (weight_tensors(folder) if has_weights(folder) else ())
        if entry["dtype"] in ("BF16", "F16")
    )


def _widen_on_use(model: Any) -> None:
    """Make layers with 16-bit weights compute in float32; all but matrices are widened at once."""
    for module in model.modules():
        half_precision = [
            p for p in module.parameters(recurse=False) if p.dtype in (torch.bfloat16, torch.float16)
        ]
        if half_precision and type(module) is nn.Linear:
            module.forward = partial(_widened_linear, module)  # type: ignore[method-assign]
        elif half_precision and type(module) is nn.Embedding:
            module.register_forward_hook(lambda embedding, args, rows: rows.float())
        else:
            for parameter in half_precision:
                parameter.data = parameter.data.float()


def _widened_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    bias = None if layer.bias is None else layer.bias.float()
    return functional.linear(x, layer.weight.float(), bias)


def read_tensors(folder: Path, widen: bool = True) -> dict[str, Tensor]:
    """Return all tensors of the model in `folder`; floating ones as float32 unless `widen` is False.

    Raises:
        InputError: there are none, or a file of them is missing, damaged or incomplete.
    """
    weights = find_weights(folder)
    tensors: dict[str, Tensor] = {}
    for path in weights.files:
        try:
            file_tensors = load_file(path)
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{path}: not a readable safetensors file: {error}", code="damaged-weights"
            ) from error
        weights.require_complete(path, file_tensors)
        tensors.update({name: tensor for name, tensor in file_tensors.items() if weights.holds(path, name)})
    return {name: t.float() if widen and t.is_floating_point() else t for name, t in tensors.items()}


def save_model(
    model: Any, edits: list[Edit], out: Path, src: Path, dtype: StoredDtype = "keep"
) -> list[Message]:
    """Write `model` into `out`: config, edits, weights; the tokenizer's files are copied from `src`.

    Tensors that share memory are stored once, under the first of their names. Quantized weights and their
    scales are stored in the types of their scheme.

    Args:
        model: float32.
        edits: its structure.
        out: a folder.
        src: the folder of the source model.
        dtype: storage type of float weights; keep: each as in `src` (float32 if `src` has no weights).

    Returns:
        Warnings: weights that do not fit into 16 bits.
    """
    edits = add_mask_edits(model, edits)
    tensors, names = _unique_tensors(model)
    types = stored_dtypes(src, dtype)
    fixed = quantized_dtypes(model)
    dtypes = {
        name: fixed[name] if name in fixed else types.dtype_for(names[name])
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
    }
    stored_tensors, notes = cast_to_stored(tensors, dtypes)
    stored_tensors = transpose_conv1d_tensors(model, stored_tensors)
    if is_sentence_model(model) and not edits:  # else only smelt reads it, with the names in its edits
        stored_tensors = as_bare_encoder(model, stored_tensors)
    save_file(stored_tensors, out / WEIGHTS_FILE, metadata={"format": "pt"})
    save_config_files(
        model, edits, out, src, config_dtype(t for name, t in stored_tensors.items() if name not in fixed)
    )
    return notes


def save_config_files(model: Any, edits: list[Edit], out: Path, src: Path, dtype: str) -> None:
    """Write the files next to the weights into `out`: config (with `dtype`), edits, tokenizer's files."""
    model.config.architectures = [getattr(model, "body_class", type(model)).__name__]
    model.config.dtype = dtype
    model.config.save_pretrained(out)
    if model.can_generate():
        model.generation_config.save_pretrained(out)
    write_edits(out, edits)
    copy_tokenizer(src, out)


def _unique_tensors(model: Any) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Return the tensors of a file by the first of their names, and all names of each."""
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    first: dict[tuple[int, torch.Size], str] = {}
    tensors: dict[str, Tensor] = {}
    names: dict[str, list[str]] = {}
    for name, tensor in model.state_dict().items():
        if name in ignored:
            continue
        storage = (tensor.data_ptr(), tensor.shape)
        canonical = first.setdefault(storage, name) if tensor.numel() else name
        names.setdefault(canonical, []).append(name)
        if canonical == name:
            tensors[name] = tensor.detach().cpu().contiguous()
    return tensors, names


def _write_chat_rules(folder: Path, rules: TextRules) -> None:
    """Store the special tokens of a chat template, and let generation end where the assistant's turn ends.

    A base model with a chat template often ends texts by another token than the template's turns.

    Raises:
        InputError: there is no chat template.
    """
    tokenizer = load_tokenizer(folder)
    special = {str(name): str(token) for name, token in tokenizer.special_tokens_map.items()}
    rules = rules.model_copy(update={"special_tokens": special})
    write_json(folder / TEXT_RULES_FILE, rules.model_dump(exclude_defaults=True))
    template = read_prompt_template(folder)
    assert template is not None
    rendered_turn = template.render_response(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    )
    ids = tokenizer(rendered_turn.end.strip(), add_special_tokens=False)["input_ids"]
    if len(ids) != 1 or ids[0] not in tokenizer.all_special_ids:
        return
    path, config = folder / "generation_config.json", load_config(folder)
    settings = read_json_object(path) or GenerationConfig.from_model_config(config).to_dict()
    eos_token_id = settings.get("eos_token_id")
    eos_ids = (
        eos_token_id if isinstance(eos_token_id, list) else [] if eos_token_id is None else [eos_token_id]
    )
    if ids[0] not in eos_ids:
        settings["eos_token_id"] = [*eos_ids, ids[0]]
        GenerationConfig.from_dict(settings).save_pretrained(folder)


def _is_tokenizer_file(path: Path) -> bool:
    return (
        path.suffix in TOKENIZER_SUFFIXES and path.name not in _NOT_TOKENIZER and is_artifact_file(path.name)
    )


def copy_tokenizer(src: Path, out: Path) -> None:
    """Copy the tokenizer's files, the shortlist and the files of a sentence embedder from `src`."""
    if (src / SHORTLIST).is_file():
        shutil.copyfile(src / SHORTLIST, out / SHORTLIST)
    for path in sorted(src.iterdir()):
        if path.is_file() and _is_tokenizer_file(path):
            shutil.copyfile(path, out / path.name)
    for name in SENTENCE_FILES:
        if (src / MODULES_FILE).is_file() and (src / name).is_file():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(src / name, out / name)


def write_text_rules(folder: Path, rules: TextRules) -> None:
    """Write `rules` to the model's `folder`, replacing earlier ones.

    A prompt template is stored with the tokenizer's special tokens; the token that ends the assistant's turn
    in a chat template also ends a generated text. A target language becomes the first generated token: the
    decoder's start for MBartTokenizer (mBART-25), else the forced first token (mBART-50), as transformers'
    tokenizers document.

    Raises:
        InputError: the tokenizer does not have a language.
    """
    if rules == TextRules():
        (folder / TEXT_RULES_FILE).unlink(missing_ok=True)
        return
    write_json(folder / TEXT_RULES_FILE, rules.model_dump(exclude_defaults=True))
    if rules.prompt_template == CHAT:
        _write_chat_rules(folder, rules)
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
