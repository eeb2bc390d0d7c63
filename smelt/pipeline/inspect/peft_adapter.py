"""An adapter of peft as a model: read its config, and merge it into its base model.

Hu et al. 2021, LoRA, arXiv:2106.09685, also as rsLoRA (arXiv:2312.03732) and DoRA (arXiv:2402.09353). peft
itself adds and merges the adapters, in float32. A head in the adapter's file (`modules_to_save`) replaces the
base model's; where the base model has none, it gets one of that size first.

What changes the structure of a model, or needs more than its weights, is refused by name.
"""

from __future__ import annotations

import re
import shutil
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.files import load_json, read_json_object
from smelt.core.messages import message_codes
from smelt.core.system import require_package
from smelt.core.workspaces import temporary_workspace
from smelt.data.labels import class_names
from smelt.models.weight_files import has_weights, read_header
from smelt.training.settings import PEFT_VERSION

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_MAX_PROBLEM = 300  # characters of an error of peft
_PREFIX = "base_model.model."  # of names in the adapter's file
_HEADS = {"SEQ_CLS": "ForSequenceClassification", "TOKEN_CLS": "ForTokenClassification"}
# Fields of peft's LoraConfig whose adapters are no change of the weights alone, or that import a module by
# the name in the file (Megatron).
_UNSUPPORTED_FIELDS: tuple[str, ...] = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
)
_UNSUPPORTED_FIELDS += ("megatron_config", "monteclora_config", "use_bdlora", "use_qalora", "velora_config")


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter's folder, and what its config says.

    base: folder or hub id of the base model. variant: LoRA, rsLoRA, DoRA. head: the end of the class name of
    a classifier, such as `ForSequenceClassification`; empty if the config names none. num_labels: outputs of
    the head in the adapter's file; None without one. revision: of the base model on the hub.
    """

    folder: Path
    base: str
    variant: str
    rank: int
    head: str
    num_labels: int | None
    revision: str | None = None

    @property
    def files(self) -> list[Path]:
        """The adapter's files, and those of a tokenizer next to them."""
        return sorted(path for path in self.folder.iterdir() if path.is_file())


def is_adapter(folder: Path) -> bool:
    """Return whether `folder` has an adapter of peft and no model."""
    return (folder / ADAPTER_CONFIG).is_file() and not has_weights(folder)


def read_adapter(folder: Path) -> PeftAdapter:
    """Return the adapter in `folder`; only its config and the header of its weights are read.

    Raises:
        InputError: `unsupported-adapter`: another type than LoRA, or a field that cannot be merged;
            `missing-base-model`: the config names none; a file is missing or damaged.
    """
    path = folder / ADAPTER_CONFIG
    config = _read_config(path)
    peft_type, base, rank = (config.get(name) for name in ("peft_type", "base_model_name_or_path", "r"))
    fields = [name for name in _UNSUPPORTED_FIELDS if config.get(name)]
    if peft_type != "LORA" or fields:
        what = f"peft_type is '{peft_type}'" if peft_type != "LORA" else f"it sets {' and '.join(fields)}"
        raise InputError(
            f"{path}: {what}, which is not supported. Supported: LORA, also with use_rslora and use_dora."
            " Merge it with peft: PeftModel.from_pretrained(base, FOLDER).merge_and_unload()"
            ".save_pretrained(NEW).",
            code="unsupported-adapter",
        )
    if type(rank) is not int:
        text = f"{path}: r is {rank!r}, expected an integer. Save the adapter again."
        raise InputError(text, code="damaged-file")
    if not isinstance(base, str) or not base.strip():
        raise InputError(
            f"{path}: base_model_name_or_path is {base!r}. Set it to the folder or hub id of the model that"
            " the adapter was trained on.",
            code="missing-base-model",
        )
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise InputError(
            f"{folder}: no {ADAPTER_WEIGHTS}. Pickle files (adapter_model.bin) are not read; save the"
            " adapter with safe_serialization=True.",
            code="missing-weights",
        )
    variant = ("rsLoRA" if config.get("use_rslora") else "LoRA") + (
        " with DoRA" * bool(config.get("use_dora"))
    )
    head, num_labels = _head_of(config), _num_labels(folder)
    return PeftAdapter(folder, base, variant, rank, head, num_labels, config.get("revision"))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = load_json(path)
    except (OSError, ValueError, RecursionError) as error:
        text = f"{path}: cannot be read: {error}. Save the adapter again."
        raise InputError(text, code="damaged-file") from error
    if not isinstance(config, dict):
        raise InputError(f"{path}: expected a JSON object. Save the adapter again.", code="damaged-file")
    return config


def _head_of(config: Mapping[str, Any]) -> str:
    mapping = config.get("auto_mapping")
    name = str(mapping.get("base_model_class")) if isinstance(mapping, dict) else ""
    match = re.search(r"For\w+Classification$", name)
    return _HEADS.get(str(config.get("task_type")), match[0] if match else "")


def _num_labels(folder: Path) -> int | None:
    """Return the outputs of the head in the adapter's file: rows of the narrowest matrix stored whole."""
    header = read_header(folder / ADAPTER_WEIGHTS)
    row_counts = [
        entry["shape"][0]
        for name, entry in header.items()
        if name.endswith(".weight") and ".lora_" not in name and len(entry["shape"]) == 2
    ]
    return min(row_counts, default=None)


def merge_adapter(adapter: PeftAdapter, base: Path, out: Path) -> None:
    """Write the base model in `base` with the adapter merged into `out`, an empty folder.

    The tokenizer's files are the adapter's, where it has some.

    Raises:
        InputError: `adapter-mismatch`: the adapter belongs to another model; `missing-head`: a classifier's
            layer is in neither; `already-quantized`: the weights of the base model are quantized.
        MissingDependencyError: peft is not installed.
    """
    require_package("peft", PEFT_VERSION, f"{adapter.folder}: an adapter of peft")
    from smelt.models.checkpoint import copy_tokenizer, load_model, save_model
    from smelt.models.import_model import import_model

    labels = _labels(adapter, base) if adapter.head and adapter.num_labels is not None else None
    with temporary_workspace() as space:
        codes = message_codes(import_model(base, space, labels, auto_class=f"AutoModel{adapter.head}"))
        if "already-quantized" in codes:
            raise InputError(
                f"{adapter.folder}: its base model {base} is quantized, so the adapter cannot be merged. Use"
                " the float model as base_model_name_or_path.",
                code="already-quantized",
            )
        model, edits = load_model(space)
        stored = set(read_header(adapter.folder / ADAPTER_WEIGHTS)) - {"__metadata__"}
        if "new-classifier" in codes:
            _require_whole_head(adapter, base, model, stored)
        model = _merged(adapter, base, model, stored)
        if labels is not None and len(labels) == model.config.num_labels:
            model.config.id2label = dict(enumerate(labels))
            model.config.label2id = {name: i for i, name in enumerate(labels)}
        save_model(model, edits, out, space)
    copy_tokenizer(adapter.folder, out)
    for path in base.iterdir():  # the license, for packages
        if path.is_file() and (path.name == "README.md" or path.name.upper().startswith("LICEN")):
            shutil.copyfile(path, out / path.name)


def merged_config(adapter: PeftAdapter, base: Path) -> dict[str, Any]:
    """Return the config that the merged model will have. base: folder with the config of the base model."""
    config = read_json_object(base / "config.json")
    if not adapter.head or adapter.num_labels is None:
        return config
    base_class = str((config.get("architectures") or [""])[0])
    family_name = re.sub(r"(For\w+|Model)$", "", base_class)
    labels = dict(enumerate(_labels(adapter, base)))
    return {**config, "architectures": [f"{family_name}{adapter.head}"], "id2label": labels}


def _labels(adapter: PeftAdapter, base: Path) -> list[str]:
    """Return the names of the outputs of the head: `id2label` in a config.json of the adapter or its base.

    peft's own config has none. Names of another number of outputs are of another head.
    """
    for folder in (adapter.folder, base):
        config = read_json_object(folder / "config.json")
        if config.get("id2label") and len(names := class_names(config)) == adapter.num_labels:
            return names
    return [f"LABEL_{i}" for i in range(adapter.num_labels or 0)]


def _require_whole_head(adapter: PeftAdapter, base: Path, model: Any, stored: set[str]) -> None:
    """Require that the adapter's file has all weights of a head that the base model does not have."""
    from smelt.models.families.registry import output_modules

    heads = tuple(f"{name}." for name in output_modules(model))
    names = (name for name, _ in model.named_parameters() if name.startswith(heads))
    if random := [name for name in names if f"{_PREFIX}{name}" not in stored]:
        raise InputError(
            f"{adapter.folder}: '{random[0]}' is neither in the adapter nor in its base model {base}, so that"
            " it would be random. Save it with the adapter (modules_to_save).",
            code="missing-head",
        )


def _merged(adapter: PeftAdapter, base: Path, model: Any, stored: set[str]) -> Any:
    """Return `model` with the adapter merged. stored: names in the adapter's file."""
    from smelt.quantization.schemes.bitsandbytes import silence_bitsandbytes

    with silence_bitsandbytes():  # peft imports bitsandbytes if it is installed
        from peft import PeftModel, get_peft_model_state_dict
    tied = model.get_output_embeddings() is not None and (
        model.get_output_embeddings().weight is model.get_input_embeddings().weight
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what peft warns of is an error below
            adapted = PeftModel.from_pretrained(model, str(adapter.folder), torch_device="cpu")
        needed = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
        known = needed | set(adapted.state_dict())
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise _mismatch(adapter, base, str(error)) from error
    if wrong := sorted((needed - stored) | (stored - known)):
        where = "not in the adapter's file" if wrong[0] in needed else "not in the model"
        raise _mismatch(adapter, base, f"'{wrong[0]}' is {where}")
    merged = adapted.merge_and_unload()
    if tied and merged.get_output_embeddings().weight is not merged.get_input_embeddings().weight:
        raise _mismatch(adapter, base, "it unties the output layer from the token embedding")
    return merged


def _mismatch(adapter: PeftAdapter, base: Path, problem: str) -> InputError:
    shown = textwrap.shorten(problem, _MAX_PROBLEM, placeholder=" [...]").rstrip(".")
    return InputError(
        f"{adapter.folder}: the adapter does not fit its base model {base}: {shown}. Set"
        " base_model_name_or_path to the model that it was trained on.",
        code="adapter-mismatch",
    )
