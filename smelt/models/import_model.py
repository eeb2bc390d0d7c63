"""Import a user's model as the first artifact of a run, with its licence.

The licence is read from the front matter of the model card, or from a licence file.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from smelt.core.artifact import MANIFEST, is_artifact_file
from smelt.core.errors import InputError
from smelt.core.files import read_json_object, write_json
from smelt.core.messages import Message, warning
from smelt.data.labels import CLASSIFIER_SUFFIXES, SINGLE_LABEL, ProblemType
from smelt.models.checkpoint import (
    TOKENIZER_SUFFIXES,
    load_model,
    rename_tensor,
    require_base_weights,
    save_model,
)
from smelt.models.empty_model import load_config
from smelt.models.families.registry import FAMILIES, reads_images
from smelt.models.import_quantized import import_quantized
from smelt.models.quantization_config import new_head_message, parse_quantization_config
from smelt.models.seq2seq_head import add_tied_head, lacks_head
from smelt.models.silence_transformers import silence_transformers
from smelt.models.text_rules import (
    MODULES_FILE,
    POOLING_FOLDER,
    PROMPTS_FILE,
    SENTENCE_CONFIG_FILE,
    SENTENCE_FILES,
    SentenceRules,
    write_sentence_rules,
)
from smelt.models.weight_files import WEIGHTS_INDEX_FILE, find_weights, weight_tensors


def import_model(
    src: Path,
    out: Path,
    labels: list[str] | None = None,
    seed: int = 0,
    problem: ProblemType | None = None,
    sentences: SentenceRules | None = None,
) -> list[Message]:
    """Copy the Hugging Face model folder `src` into `out`, as the first artifact of a run.

    Where `labels` are given and the checkpoint is a bare encoder, it gets a new classification head,
    drawn with `seed`. The `problem` type of a classifier is written to its config if missing, for all later
    steps. Quantized weights of a GPTQ or AWQ checkpoint become those of its layers. The `sentences` rules of
    a sentence embedder are stored for all later steps. Returns warnings.

    Raises:
        InputError: quantized weights cannot be imported exactly.
    """
    config = load_config(src)
    architecture = (config.architectures or [""])[0]
    coding = parse_quantization_config(config.to_dict())
    names, both = config.architectures, config.is_encoder_decoder
    bare = lacks_head({"architectures": names, "is_encoder_decoder": both})
    if coding is not None and (bare or _needs_new_head(labels, architecture)):
        raise InputError(f"{src}: {new_head_message(coding)}", code="already-quantized")
    if labels is not None and _needs_new_head(labels, architecture):
        return _with_new_head(src, out, labels, seed, problem)
    if bare:
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


def _needs_new_head(labels: list[str] | None, architecture: str) -> bool:
    """Return whether labels are given and the model has no head for them."""
    return labels is not None and not architecture.endswith(CLASSIFIER_SUFFIXES)


def _has_older_names(src: Path, kind: str) -> bool:
    """Return whether tensors of `src` have the former names of the family `kind`."""
    known = FAMILIES.get(kind)
    pairs = known.renamed_tensors if known else ()
    return bool(pairs) and any(rename_tensor(name, pairs) != name for _, name, _ in weight_tensors(src))


def configure_embedder(folder: Path, rules: SentenceRules) -> None:
    """Store in `folder` the `rules` by which all readers make vectors of texts, and their maximum length."""
    config = read_json_object(folder / "config.json")
    write_sentence_rules(folder, rules, int(config[FAMILIES[str(config["model_type"])].hidden_size_key]))
    if rules.max_length is not None:  # sentence-transformers writes it there too
        path = folder / "tokenizer_config.json"
        write_json(path, read_json_object(path) | {"model_max_length": rules.max_length})


def classifier_class(kind: str) -> Any:
    """Return transformers' classifier class of the model type `kind`."""
    if reads_images({"model_type": kind}):
        return transformers.AutoModelForImageClassification
    return transformers.AutoModelForSequenceClassification


def source_files(src: Path) -> list[Path]:
    """Return the files that are read of the model folder `src`: weights, settings and texts.

    Raises:
        InputError: there are no weights, or a file of them is missing.
    """
    weights = find_weights(src)
    # an index that is not used may name missing files
    left_out = {MANIFEST, WEIGHTS_INDEX_FILE} - ({weights.index.name} if weights.index else set())
    left_out |= {MODULES_FILE, SENTENCE_CONFIG_FILE}  # their content is in `SentenceRules`
    texts = [
        path
        for path in src.iterdir()
        if path.suffix in TOKENIZER_SUFFIXES and is_artifact_file(path.name) and path.is_file()
    ]  # no LICENSE.txt, no requirements.txt
    return sorted({*weights.files, *(path for path in texts if path.name not in left_out)})


def _with_new_head(
    src: Path, out: Path, labels: list[str], seed: int, problem: ProblemType | None
) -> list[Message]:
    names, config = dict(enumerate(labels)), load_config(src)
    torch.manual_seed(seed)
    with silence_transformers():
        model, info = classifier_class(config.model_type).from_pretrained(
            src,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            num_labels=len(labels),
            id2label=names,
            label2id={v: k for k, v in names.items()},
            problem_type=problem,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # of its previous head; others raise an error below
        )
    require_base_weights(model.config.model_type, info, src, new_head=True)
    notes = save_model(model, [], out, src)
    for name in (*SENTENCE_FILES, PROMPTS_FILE):  # it is no longer a sentence embedder
        (out / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # missing, or not empty
        (out / POOLING_FOLDER).rmdir()
    return [
        *notes,
        warning(
            "new-classifier",
            f"The checkpoint has no classification head. An untrained head for {len(labels)}"
            f" label{'s' * (len(labels) != 1)} was added; train it before you use the scores.",
        ),
    ]


_CARD = "README.md"
_FILES = re.compile(r"(licen[sc]e|copying)(\.(txt|md|rst))?", re.IGNORECASE)
_MAX_BYTES = 1_000_000  # bytes that are read
_MAX_LINE_LENGTH = 100


def read_licence(folder: Path) -> str | None:
    """Return the licence of the model in `folder` in one line; None where it is not stated."""
    return _licence_from_card(folder / _CARD) or _licence_from_file(folder)


def _licence_from_card(path: Path) -> str | None:
    """Return the `license` of a model card, with its name or link where it is `other`."""
    front = re.match(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", _read(path), flags=re.S)
    if front is None:
        return None
    import yaml

    try:
        values = yaml.safe_load(front[1])
    except (yaml.YAMLError, RecursionError, ValueError):
        return None
    values = values if isinstance(values, dict) else {}
    fields = [values.get(key) for key in ("license", "license_name", "license_link")]
    words = [str(w) for field in fields if field for w in (field if isinstance(field, list) else [field])]
    return _single_line(f"{', '.join(words)} (its model card)") if words else None


def _licence_from_file(folder: Path) -> str | None:
    """Return the first words of a licence file, which are its name."""
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
    short = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return short if len(short) <= _MAX_LINE_LENGTH else short[: _MAX_LINE_LENGTH - 3] + "..."
