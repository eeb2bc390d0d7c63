"""The format `huggingface`: a folder that `from_pretrained` of transformers opens, with a model card.

The front matter of the model card has the scores in the form `model-index`. Source: huggingface_hub's
repocard_data.py, `eval_results_to_model_index`.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, ClassVar

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.files import read_json_object, write_json
from smelt.data.tasks import task_traits, tasks_with
from smelt.export.package.hub_files import (
    FAST_TOKENIZER_CLASS,
    TOKENIZER_CONFIG_FILE,
    extra_requirements,
    generate_arguments,
    portable_tokenizer_config,
    preprocessing_notes,
    with_prefix,
)
from smelt.export.package.package_format import PackageOrigin, SupportedArtifacts, UsageNotes
from smelt.export.package.write_package import copy_artifact
from smelt.models.edits import Edit, read_edits
from smelt.models.families.registry import find_family
from smelt.models.text_rules import SHORTLIST_FILE as SHORTLIST
from smelt.models.weight_files import WEIGHTS_INDEX_FILE, find_weights
from smelt.tasks.registry import task_spec

_CARD = " (its model card)"


def card_front_matter(task: str, origin: PackageOrigin, library: str) -> str:
    """Return YAML: license, library, task and scores.

    Args:
        task: as in a recipe.
        origin: the artifact's origin.
        library: the library that opens the folder.
    """
    from huggingface_hub import ModelCardData

    tag = task_spec(task).hub_tag or task
    front: dict[str, Any] = {"library_name": library, "pipeline_tag": tag, "tags": ["smelt"]}
    front |= _hub_license(origin.license)
    scores = [score for score in origin.scores if score.value is not None]
    if scores:
        data = origin.data or origin.split
        metric_results = [
            {"type": s.key, "value": s.value, "name": f"{s.metric} {s.text} of {s.n:,}", "args": s.signature}
            for s in scores
        ]
        result = {
            "task": {"type": tag, "name": task},
            "dataset": {"type": _slug(data), "name": data, "split": origin.split},
            "metrics": [metric | {"args": {"signature": metric["args"]}} for metric in metric_results],
        }
        front["model-index"] = [{"name": origin.run or "model", "results": [result]}]
    return f"{ModelCardData(**front).to_yaml()}\n"


def _hub_license(text: str | None) -> dict[str, str]:
    """Return the license in the Hub's terms; `other` with a name if it is not one of them."""
    if text is None:
        return {}
    license_id = text.removesuffix(_CARD)
    if re.fullmatch(r"[a-z0-9][a-z0-9.\-]*", license_id):
        return {"license": license_id}
    return {"license": "other", "license_name": _slug(license_id)}


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._/-]+", "-", text).strip("-") or "data"


# kinds of edits that config.json cannot describe, and the stage that makes them
_EDIT_DESCRIPTIONS = {
    "quantize": ("quantized layers", "quantize"),
    "low_rank": ("low-rank layers", "factorize"),
    "linear": ("layers of sizes for which the config has no key", "prune"),
    "set": ("numbers of heads for which the config has no key", "prune"),
    "own_bias": ("a position bias of one layer", "prune"),
    "width": ("a smaller hidden size", "prune"),
    "skip": ("layers without an attention or feed-forward block", "drop-layers"),
    "share": ("matrices shared by several layers", "share-weights"),
}
_OF_FIVE = "TokenizersBackend"


class HuggingFaceFormat:
    """`AutoModel...from_pretrained(folder)`: weights, config and tokenizer, also for the Hub."""

    name: ClassVar[str] = "huggingface"
    summary: ClassVar[str] = "a model for transformers' from_pretrained, and model card"
    supported: ClassVar[SupportedArtifacts] = SupportedArtifacts(
        formats=frozenset({"torch"}),
        tasks=frozenset(tasks_with(modality="text")),
        hint="Package the step before the export.",
    )
    is_artifact: ClassVar[bool] = True

    def check(self, artifact: Artifact) -> None:
        """Require a structure that config.json can describe.

        Raises:
            InputError: it has layers that transformers would create differently; names them and the stage.
        """
        require_config_structure(read_edits(artifact.path))

    def write(self, artifact: Artifact, origin: PackageOrigin, folder: Path) -> UsageNotes:
        """Copy the artifact; change its tokenizer class to one that transformers 4 supports too."""
        usage = copy_hub_folder(artifact, origin, folder)
        write_published_names(folder)
        return usage


def require_config_structure(edits: Iterable[Edit]) -> None:
    """Require that config.json can describe the structure with these edits.

    Raises:
        InputError: transformers would create some layers differently; names them and the stage.
    """
    # masks only affect later training
    edit_counts = Counter(str(edit.get("op")) for edit in edits if edit.get("op") != "mask")
    if edit_counts:
        parts = [_describe_edit(op, count) for op, count in edit_counts.items()]
        raise InputError(
            f"config.json of transformers cannot describe {'; '.join(parts)}. Package an earlier step,"
            " or export the model (`- onnx: {target: ort-cpu}`) for a format of ONNX graphs, such as"
            " standalone.",
            code="unsupported-structure",
        )


def copy_hub_folder(
    artifact: Artifact,
    origin: PackageOrigin,
    folder: Path,
    skip: Collection[str] = (),
    config_class: str = "",
    config_arguments: str = "",
) -> UsageNotes:
    """Copy the artifact into `folder`, with a tokenizer for transformers 4 too; return how it is used.

    Args:
        artifact: to copy.
        origin: its origin.
        folder: an empty one.
        skip: files that are not copied.
        config_class: of transformers; an instance is the argument `quantization_config` of the model.
        config_arguments: of this class.
    """
    copy_artifact(artifact, folder, skip)
    config = read_json_object(folder / TOKENIZER_CONFIG_FILE)
    if config:
        new = portable_tokenizer_config(config)
        if new.get("tokenizer_class") == _OF_FIVE:
            new["tokenizer_class"] = FAST_TOKENIZER_CLASS
        write_json(folder / TOKENIZER_CONFIG_FILE, new)
    task = artifact.manifest.task
    library = "sentence-transformers" if task_traits(task).output == "embedding" else "transformers"
    code = _example_code(task, artifact.path, origin, config_class, config_arguments)
    notes = list(preprocessing_notes(artifact.path))
    if (artifact.path / SHORTLIST).is_file():
        notes.append(
            "The model was scored with a shortlist, which transformers does not support. It uses the"
            " whole vocabulary, so texts may differ."
        )
    return UsageNotes(
        install=f"pip install transformers torch{extra_requirements(folder)}",
        run=f"python -c {shlex.quote(code.replace(chr(10), '; '))}",
        examples=(("python", code),),
        notes=tuple(notes),
        front_matter=card_front_matter(task, origin, library),
    )


def write_published_names(folder: Path) -> None:
    """Give the tensors in `folder` the names in transformers' files, which other programs read."""
    from safetensors.torch import load, save_file

    from smelt.models.checkpoint import rename_tensor

    family = find_family(read_json_object(folder / "config.json"))
    pairs = family.published_tensors if family else ()
    if not pairs:
        return
    for path in find_weights(folder).files:
        tensors = {rename_tensor(name, pairs): tensor for name, tensor in load(path.read_bytes()).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    if (folder / WEIGHTS_INDEX_FILE).is_file():
        index = read_json_object(folder / WEIGHTS_INDEX_FILE)
        names = {rename_tensor(name, pairs): file for name, file in index["weight_map"].items()}
        write_json(folder / WEIGHTS_INDEX_FILE, index | {"weight_map": names})


def _describe_edit(op: str, count: int) -> str:
    description, stage = _EDIT_DESCRIPTIONS.get(op, (f"edits of the kind {op!r}", "a stage"))
    return f"{description} ({count}, made by {stage})"


def _example_code(
    task: str, source: Path, origin: PackageOrigin, config_class: str, config_arguments: str
) -> str:
    name, text = task_traits(task).auto_class, with_prefix(source, "A text.")
    imports = f", {config_class}" if config_class else ""
    argument = f", quantization_config={config_class}({config_arguments})" if config_class else ""
    arguments = f"[{text!r}]"
    if name == "AutoModelForQuestionAnswering":
        arguments = repr("Where does Ada live?") + ", " + repr("Ada lives in London.")
    lines: list[Any] = [
        f"from transformers import AutoTokenizer, {name}{imports}",
        'tokenizer = AutoTokenizer.from_pretrained(".")',
        f'model = {name}.from_pretrained("."{argument}).eval()',
        f'inputs = tokenizer({arguments}, return_tensors="pt")',
    ]
    if name in ("AutoModelForSeq2SeqLM", "AutoModelForCausalLM"):
        lines.append(f"found = model.generate(**inputs{generate_arguments(origin)})")
        lines.append("print(tokenizer.batch_decode(found, skip_special_tokens=True))")
    elif name == "AutoModelForQuestionAnswering":
        lines.append("outputs = model(**inputs)")
        lines.append("start, end = outputs.start_logits.argmax(), outputs.end_logits.argmax()")
        lines.append("print(tokenizer.decode(inputs['input_ids'][0, start : end + 1]))")
    else:
        lines.append("print(model(**inputs)[0])")  # hidden states of an AutoModel, else logits
    return "\n".join(lines)
