"""The untouched model of a user as the first artifact of a run."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from smelt.core.artifact import MANIFEST, is_known_kind
from smelt.core.errors import InputError
from smelt.core.files import read_json, write_json
from smelt.core.labels import CLASSIFIERS, SINGLE, ProblemType
from smelt.core.messages import Message, warning
from smelt.families.registry import FAMILIES, reads_images
from smelt.runtime.models.checkpoint import TOKENIZER_SUFFIXES, load_model, save_model
from smelt.runtime.models.coded.said import coding_of, no_other_head
from smelt.runtime.models.coded.take import take_codes
from smelt.runtime.models.making.empty_model import load_config
from smelt.runtime.models.making.seq2seq_head import add_tied_head, lacks_head
from smelt.runtime.models.places.fill import renamed
from smelt.runtime.models.places.weights_fit import require_body
from smelt.runtime.models.quiet import quiet
from smelt.runtime.models.weight_files import INDEX, find_weights, weight_tensors
from smelt.runtime.text.sentence_files import (
    FILES,
    MODULES,
    POOLING_FOLDER,
    PROMPTS,
    SETTINGS,
    SentenceRules,
    write_sentence_rules,
)


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
    drawn with `seed`. A config that does not say the `problem` type of a classifier is told it, so that
    everything after knows it. The codes of a GPTQ or AWQ checkpoint become those of its layers. Of an encoder
    that makes `sentences` to vectors everything after knows how. Returns warnings.

    Raises:
        InputError: codes cannot be taken over as they are.
    """
    config = load_config(src)
    architecture = (config.architectures or [""])[0]
    coding = coding_of(config.to_dict())
    names, both = config.architectures, config.is_encoder_decoder
    bare = lacks_head({"architectures": names, "is_encoder_decoder": both})
    if coding is not None and (bare or _lacks_classes(labels, architecture)):
        raise InputError(f"{src}: {no_other_head(coding)}", code="already-quantized")
    if labels is not None and _lacks_classes(labels, architecture):
        return _with_new_head(src, out, labels, seed, problem)
    if bare:
        return add_tied_head(src, out)
    notes: list[Message] = []
    if coding is not None:
        beside = [path for path in source_files(src) if path.suffix != ".safetensors"]
        notes = take_codes(src, out, coding, [path for path in beside if path.name != "config.json"])
    elif _has_older_names(src, config.model_type):
        model, edits = load_model(src)
        return save_model(model, edits, out, src)
    else:
        for path in source_files(src):
            shutil.copyfile(path, out / path.name)
    if problem not in (None, SINGLE) and config.problem_type is None:
        values = read_json(out / "config.json")
        write_json(out / "config.json", values | {"problem_type": problem})
    if sentences is not None:
        make_embedder(out, sentences)
    return notes


def _lacks_classes(labels: list[str] | None, architecture: str) -> bool:
    """Say whether classes are wanted that the model has no head for."""
    return labels is not None and not architecture.endswith(CLASSIFIERS)


def _has_older_names(src: Path, kind: str) -> bool:
    """Say whether tensors of `src` are called as the family `kind` called them once."""
    known = FAMILIES.get(kind)
    pairs = known.renamed if known else ()
    return bool(pairs) and any(renamed(name, pairs) != name for _, name, _ in weight_tensors(src))


def make_embedder(folder: Path, rules: SentenceRules) -> None:
    """Let all that open the encoder in `folder` make vectors by `rules`, and cut texts as they say."""
    config = read_json(folder / "config.json")
    write_sentence_rules(folder, rules, int(config[FAMILIES[str(config["model_type"])].width]))
    if rules.max_length is not None:  # where sentence-transformers writes it too
        path = folder / "tokenizer_config.json"
        write_json(path, read_json(path) | {"model_max_length": rules.max_length})


def classifier_class(kind: str) -> Any:
    """Return transformers' class that makes a classifier of the model type `kind`."""
    if reads_images({"model_type": kind}):
        return transformers.AutoModelForImageClassification
    return transformers.AutoModelForSequenceClassification


def source_files(src: Path) -> list[Path]:
    """Return what is read of the model folder `src`: its weights, and the settings and texts beside them.

    Raises:
        InputError: there are no weights, or a file of them is missing.
    """
    weights = find_weights(src)
    # an index that is not followed may name files that are not there
    left_out = {MANIFEST, INDEX} - ({weights.index.name} if weights.index else set())
    left_out |= {MODULES, SETTINGS}  # what is done with them is said in `SentenceRules`
    texts = [
        path
        for path in src.iterdir()
        if path.suffix in TOKENIZER_SUFFIXES and is_known_kind(path.name) and path.is_file()
    ]  # no LICENSE.txt, no requirements.txt
    return sorted({*weights.files, *(path for path in texts if path.name not in left_out)})


def _with_new_head(
    src: Path, out: Path, labels: list[str], seed: int, problem: ProblemType | None
) -> list[Message]:
    names, config = dict(enumerate(labels)), load_config(src)
    torch.manual_seed(seed)
    with quiet():
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
            ignore_mismatched_sizes=True,  # of the head that it had; others are refused below
        )
    require_body(model.config.model_type, info, src, new_head=True)
    notes = save_model(model, [], out, src)
    for name in (*FILES, PROMPTS):  # it makes no vectors any more
        (out / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not there, or not empty
        (out / POOLING_FOLDER).rmdir()
    return [
        *notes,
        warning(
            "new-classifier",
            f"The checkpoint has no classification head: a new, untrained one for {len(labels)}"
            f" label{'s' * (len(labels) != 1)} was added.",
        ),
    ]
