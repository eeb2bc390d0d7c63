"""How an arm of techniques.py is run and scored."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smelt.core.artifact import Artifact, Manifest
from smelt.core.files import json_hash, sha256_of, write_json
from smelt.core.stage import Context
from smelt.data.examples import read_split
from smelt.data.splits import TEXT_TO_TEXT_TASKS, Columns, Split

# Raised whenever the same arm is scored in another way.
_VERSION = 2
# Of running text: tokens in a window.
_WINDOW = 128


@dataclass(frozen=True)
class ArmResult:
    """What an arm's stages leave: the last torch model, and the last artifact of any form.

    seconds: processor time of the stages. details: what each told, but long lists.
    """

    model: Artifact
    last: Artifact
    seconds: float
    details: list[dict[str, Any]]


class ArmRunner:
    """A model, its data, and how an arm is run and scored.

    split: whose rows are scored. rows: how many, and of how many texts are written. threads: of torch.
    shelf: a folder where stages keep what several of them need (a teacher's texts).
    """

    def __init__(
        self, model: Path, data: Path, task: str, split: str, rows: tuple[int, int], threads: int, shelf: Path
    ) -> None:
        self.model, self.threads, self.shelf = model, threads, shelf
        data = data.resolve()  # what rows name is relative to it
        self.task: Any = task
        self.data = {name: _read(data, name, task) for name in ("train", "validation")}
        whole = _read(data, split, task)
        self.scored, self.written = (whole.take(count) for count in rows)
        files = sorted(p for p in model.iterdir() if p.suffix in (".json", ".safetensors"))
        self.of_model = json_hash([[path.name, sha256_of(path)] for path in files])

    def key(
        self,
        stages: Sequence[Any],
        seed: int,
        train: int | None,
        beams: Sequence[int],
        as_run: bool = False,
    ) -> str:
        """Return the hash of all that an arm's scores depend on, but the code."""
        rows = [self._train(train).fingerprint, self.data["validation"].fingerprint, self.scored.fingerprint]
        texts = [list(beams), self.written.fingerprint] if beams else []
        key_parts = [_VERSION, self.of_model, self.task, [list(s) for s in stages], seed, rows, texts]
        return json_hash([*key_parts, "as run"] if as_run else key_parts)

    def measure(
        self,
        stages: Sequence[Any],
        seed: int,
        train: int | None,
        beams: Sequence[int],
        as_run: bool = False,
    ) -> dict[str, Any]:
        """Run an arm, and return its scores by row with its parameters and processor time, seconds.

        as_run: whether manifests say which step made a model, as in a run; some stages look at that.
        """
        with tempfile.TemporaryDirectory() as space:
            made = self.run(stages, seed, Path(space), train, as_run)
            nats, kl, tokens, parameters = self.losses(made.model.path)
            bleu = {str(count): self.texts(made.model, count) for count in beams}
        return {
            "parameters": parameters,
            "seconds": round(made.seconds, 1),
            "nats": nats,
            "kl": kl,
            "tokens": tokens,
            "bleu": bleu,
            "details": made.details,
        }

    def run(
        self,
        stages: Sequence[Any],
        seed: int,
        space: Path,
        train: int | None = None,
        as_run: bool = False,
    ) -> ArmResult:
        """Run an arm's stages, which leave their results below `space`."""
        from smelt.pipeline.recipe.stages import load_stage

        source = made = artifact(self.model, self.task, self.of_model)
        ancestors, spent, details = {"model": source}, 0.0, []
        data: Any = self.data | {"train": self._train(train)}
        for number, (word, settings) in enumerate(stages):
            stage: Any = load_stage(word)
            out = space / f"{number}-{word}"
            out.mkdir(parents=True)
            ctx = Context(
                out, self.task, data, seed, ancestors, score=lambda *_: {},
                threads=self.threads, device="cpu", cached_value=self._cached,
            )  # fmt: skip
            start = time.process_time()
            asked = stage.settings_type.model_validate(settings)
            stage()(source, asked, ctx)
            spent += time.process_time() - start
            key = json_hash([source.key, word, settings, seed])
            made = artifact(out, self.task, key, stage.produces, _plain(ctx.details))
            if as_run:
                fields = {"stage": word, "settings": asked.model_dump(mode="json"), "parent": source.key}
                made = replace(made, manifest=made.manifest.model_copy(update=fields))
            details.append({"stage": word, **{k: v for k, v in _plain(ctx.details).items() if _is_short(v)}})
            ancestors[word] = made
            source = made if stage.produces == "torch" else source
        return ArmResult(source, made, spent, details)

    def losses(self, folder: Path) -> tuple[list[float], list[float], list[int], int]:
        """Return what a model loses on each row, and its parameters.

        By row: the summed cross-entropy, nats; the summed KL divergence from what the untouched model says;
        tokens (labels).
        """
        import torch
        from torch.nn.functional import cross_entropy, kl_div

        from smelt.compress.train.extension import model_logits
        from smelt.compress.train.losses import IGNORE_INDEX
        from smelt.compress.train.samples import collate, encode_split, group_by_length
        from smelt.models.checkpoint import load_model, load_tokenizer
        from smelt.models.count_parameters import count_parameters

        torch.set_num_threads(self.threads)
        (model, _), (untouched, _) = load_model(folder), load_model(self.model)
        model.eval()
        untouched.eval()
        ctx = Context(folder, self.task, {}, 0, {}, score=lambda *_: {})
        rows = encode_split(self.scored, model.config, load_tokenizer(folder), ctx)
        nats, kl, tokens = [0.0] * len(rows), [0.0] * len(rows), [0] * len(rows)
        for group in group_by_length(rows, 32, None, None):
            batch = collate([rows[i] for i in group], model.config)
            labels = batch["labels"].reshape(len(group), -1)
            with torch.no_grad():
                logits, reference = model_logits(model, batch), model_logits(untouched, batch)
            each = cross_entropy(
                logits.reshape(-1, logits.shape[-1]).float(),
                labels.reshape(-1),
                reduction="none",
                ignore_index=IGNORE_INDEX,
            )
            logs = [
                found.float().log_softmax(-1).reshape(-1, found.shape[-1]) for found in (logits, reference)
            ]
            apart = kl_div(logs[0], logs[1], reduction="none", log_target=True).sum(-1).reshape(labels.shape)
            apart *= labels != IGNORE_INDEX
            for at, i in enumerate(group):
                kl[i] = float(apart[at].sum())
                nats[i] = float(each.reshape(labels.shape)[at].sum())
                tokens[i] = int((labels[at] != IGNORE_INDEX).sum())
        return nats, kl, tokens, count_parameters(folder)

    def texts(self, made: Artifact, beams: int) -> dict[str, Any]:
        """Return the statistics of BLEU of what a model writes with so many beams, in smelt's runner."""
        from smelt.evaluate.quality import score_texts
        from smelt.generation.config import GenerationSettings
        from smelt.runtimes.predict_texts import generate_texts
        from smelt.runtimes.registry import open_runner

        assert self.task in TEXT_TO_TEXT_TASKS
        rows = self.written.examples
        with open_runner(made, self.threads, "cpu") as runner:
            search = GenerationSettings(num_beams=beams, max_new_tokens=128)
            outputs = generate_texts(runner, [e.text for e in rows], search)
        return score_texts(["bleu"], outputs, [e.references for e in rows])["bleu"].statistics.dump()

    def _train(self, rows: int | None) -> Split:
        return self.data["train"] if rows is None else self.data["train"].take(rows)

    def _cached(self, what: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        path = self.shelf / f"{json_hash(what)}.json"
        if not path.exists():
            self.shelf.mkdir(parents=True, exist_ok=True)
            write_json(path, {"made": make()})
        return json.loads(path.read_text(encoding="utf-8"))["made"]


def _read(data: Path, name: str, task: Any) -> Split:
    read: Any = read_split
    text = task == "language-modeling"
    found: Split = read(str(data / f"{name}.{'txt' if text else 'jsonl'}.gz"), task, Columns(), data)
    windows = found.windows and found.windows.model_copy(update={"length": _WINDOW})
    return replace(found, windows=windows)


def artifact(
    folder: Path,
    task: str,
    key: str = "0" * 64,
    form: str = "torch",
    details: Mapping[str, Any] | None = None,
) -> Artifact:
    """Return a model's folder as what stages take."""
    fields = {"key": key, "format": form, "task": task, "stage": "model", "details": dict(details or {})}
    return Artifact(
        folder, Manifest.model_validate({**fields, "settings": {}, "seed": 0, "parent": None, "versions": {}})
    )


def _plain(details: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(details, default=str))
    return found


def _is_short(value: Any) -> bool:
    return len(json.dumps(value)) < 2_000
