"""The form `huggingface`: a folder that `from_pretrained` of transformers opens, with a model card."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

from smelt.core.artifact import Artifact
from smelt.core.data import TEXT_TASKS
from smelt.core.errors import InputError
from smelt.core.files import read_json, write_json
from smelt.export.package.form import HowTo, Origin, Takes
from smelt.export.package.hub.card import front_matter
from smelt.export.package.hub.generation import generation_words
from smelt.export.package.hub.tokenizer_files import (
    CONFIG,
    FAST,
    more_for,
    notes_on_texts,
    portable,
    prefixed,
)
from smelt.export.package.write import copy_artifact
from smelt.runtime.generate.shortlist import FILE as SHORTLIST
from smelt.runtime.models.structure import read_edits

# kinds of edits: what config.json has no word for, and the stage that makes it
_CAUSES = {
    "quantize": ("quantized layers", "quantize"),
    "low_rank": ("layers as two thin matrices", "factorize"),
    "linear": ("layers of sizes of their own", "prune"),
    "set": ("attention with fewer heads in one layer than in others", "prune"),
    "own_bias": ("a position bias of one layer alone", "prune"),
    "width": ("hidden states that are narrower than it says", "prune"),
    "skip": ("layers that have lost an attention or a feed-forward part", "drop-layers"),
    "share": ("matrices that several layers share", "share-weights"),
}
_OF_FIVE = "TokenizersBackend"
_CLASSES = {
    "translation": "AutoModelForSeq2SeqLM",
    "summarization": "AutoModelForSeq2SeqLM",
    "language-modeling": "AutoModelForCausalLM",
    "text-classification": "AutoModelForSequenceClassification",
    "sentence-similarity": "AutoModel",
}


class HuggingFace:
    """`AutoModel...from_pretrained(folder)`: weights, config and tokenizer, for the Hub too."""

    name: ClassVar[str] = "huggingface"
    summary: ClassVar[str] = "a model for from_pretrained of transformers, with a card"
    takes: ClassVar[Takes] = Takes(
        formats=frozenset({"torch"}),
        tasks=frozenset(TEXT_TASKS),
        mend="Package the step that it was exported from.",
    )
    keeps: ClassVar[bool] = True

    def check(self, artifact: Artifact) -> None:
        """Require a structure that config.json says.

        Raises:
            InputError: it has layers that transformers would make otherwise; names them and the stage.
        """
        # a mask says something of later training alone
        found = Counter(str(e.get("op")) for e in read_edits(artifact.path) if e.get("op") != "mask")
        if found:
            parts = [_cause(op, count) for op, count in found.items()]
            raise InputError(
                f"config.json of transformers has no words for {'; '.join(parts)}. Package a step before it,"
                " or export it (`- onnx: {target: ort-cpu}`) for a form of graphs, such as standalone.",
                code="unsupported-structure",
            )

    def write(self, artifact: Artifact, origin: Origin, folder: Path) -> HowTo:
        """Copy the artifact; its tokenizer's class becomes one that transformers 4 knows too."""
        copy_artifact(artifact, folder)
        said = read_json(folder / CONFIG)
        if said:
            new = portable(said)
            if new.get("tokenizer_class") == _OF_FIVE:
                new["tokenizer_class"] = FAST
            write_json(folder / CONFIG, new)
        task = artifact.manifest.task
        library = "sentence-transformers" if task == "sentence-similarity" else "transformers"
        code = _code(task, artifact.path, origin)
        notes = list(notes_on_texts(artifact.path))
        if (artifact.path / SHORTLIST).is_file():
            notes.append(
                "The model has a shortlist, with which smelt scored it. transformers does not know it and"
                " chooses from the whole vocabulary: texts may differ."
            )
        return HowTo(
            install=f"pip install transformers torch{more_for(folder)}",
            run=f"python -c {shlex.quote(code.replace(chr(10), '; '))}",
            load=(("python", code),),
            notes=tuple(notes),
            front=front_matter(task, origin, library),
        )


def _cause(op: str, count: int) -> str:
    what, stage = _CAUSES.get(op, (f"edits of the kind {op!r}", "a stage"))
    return f"{what} ({count}, made by {stage})"


def _code(task: str, source: Path, origin: Origin) -> str:
    name, text = _CLASSES[task], prefixed(source, "A text.")
    lines: list[Any] = [
        f"from transformers import AutoTokenizer, {name}",
        'tokenizer = AutoTokenizer.from_pretrained(".")',
        f'model = {name}.from_pretrained(".").eval()',
        f'inputs = tokenizer([{text!r}], return_tensors="pt")',
    ]
    if name in ("AutoModelForSeq2SeqLM", "AutoModelForCausalLM"):
        lines.append(f"found = model.generate(**inputs{generation_words(origin)})")
        lines.append("print(tokenizer.batch_decode(found, skip_special_tokens=True))")
    else:
        lines.append(f"print(model(**inputs).{'last_hidden_state' if name == 'AutoModel' else 'logits'})")
    return "\n".join(lines)
