"""A teacher that is run once a row: what it said is kept in the store, for later epochs and recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from smelt.compress.distill.losses.buckets import Buckets
from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.teachers.said import Said, Writer, fingerprint_of
from smelt.compress.train.data import ROWS, Row, collate, group_by_length
from smelt.compress.train.state import autocast, pick_precision, threads
from smelt.core.stage import Context
from smelt.runtime.backends.device import torch_device

VERSION = 1  # raised whenever the same settings give other files
_TOKENS = 4096  # of a batch that the teacher reads

# From a teacher and a batch to float [B, T, V] of words, [B, C] of classes, [2 B, D] of the vectors of pairs.
Ask: TypeAlias = Callable[[Any, Mapping[str, Tensor]], Tensor]


class KeptTeacher:
    """Answers for a teacher from what was kept of it; runs it on rows of which nothing was."""

    def __init__(
        self,
        teacher: Any,
        config: Any,
        ask: Ask,
        settings: DistillSettings,
        who: Mapping[str, Any],
        words: int | None,
        ctx: Context,
    ) -> None:
        """Prepare; nothing is run yet.

        Args:
            teacher: in eval mode, on the CPU.
            config: the student's, for batches.
            ask: how it is run.
            settings: of the step, with `cache_logits`.
            who: says which teacher it is; its "artifacts" are the keys of those that it is made of.
            words: over how many words its logits are; None: over classes, or there are vectors.
            ctx: device, threads, progress, the store; gets the fact `kept_logits`.
        """
        assert settings.cache_logits is not None
        self.teacher, self.config, self.ask, self.who = teacher, config, ask, who
        self.settings, self.words, self.ctx = settings, words, ctx
        self.top = settings.cache_logits.top_k
        self._stack = ExitStack()
        self._open: dict[str, Said] = {}
        self._parts: list[tuple[int, Said]] = []
        self._asked = self._run = 0

    def number(
        self, rows: Sequence[Row], validation: Sequence[Row] | None
    ) -> tuple[list[Row], list[Row] | None]:
        """Return both with numbers, by which they are answered for; the teacher is run on what is new."""
        self._parts.clear()
        first = self._take(rows, 0)
        return first, None if validation is None else self._take(validation, len(rows))

    def answers(self, batch: Mapping[str, Tensor]) -> Tensor | Buckets:
        """Return what the teacher says of the rows of `batch`, as if it were run on them."""
        numbers, labels = batch[ROWS].tolist(), batch["labels"]
        first, said = next(part for part in reversed(self._parts) if part[0] <= numbers[0])
        places = [number - first for number in numbers]
        self._asked += len(places)
        if self.words is None:
            return said.of_texts(places).to(labels.device)
        found = said.of_words(places, labels.shape[1])
        if isinstance(found, Tensor):
            return found.to(labels.device)
        return Buckets(found.logits.to(labels.device), found.ids.to(labels.device))

    def close(self) -> None:
        """Let go of the files; tell the report and the log how often they answered."""
        size = sum(said.size_bytes for said in self._open.values())
        rate = max(0.0, 1 - self._run / self._asked) if self._asked else 0.0
        self.ctx.details["cache_logits"] = {
            "bytes": size,
            "positions": sum(int(said.starts[-1]) for said in self._open.values()),
            "asked_rows": self._asked,
            "rows_of_teacher": self._run,
            "hit_rate": round(rate, 4),
        }
        self.ctx.say(
            f"  the teacher's answers: {size / 1e6:,.1f} MB stood in for it on {rate:.1%} of"
            f" {self._asked:,} rows"
        )
        self._open.clear()
        self._parts.clear()
        self._stack.close()

    def _take(self, rows: Sequence[Row], first: int) -> list[Row]:
        key = fingerprint_of(rows)
        if key not in self._open:
            cut = self.words is not None and self.top < self.words
            what = {
                "what": f"what the teacher says of {len(rows):,} rows",
                "version": VERSION,
                "rows": key,
                "top_k": self.top if cut else None,
                "temperature": self.settings.temperature if cut else None,
                "precision": self._precision,
                "device": self._device.type,
                **self.who,
            }
            folder, there = self._stack.enter_context(
                self.ctx.files(what, lambda to: self._ask_all(rows, to))
            )
            self._run += 0 if there else len(rows)
            self._open[key] = Said(folder, rows, self.settings.temperature)
        self._parts.append((first, self._open[key]))
        return [replace(row, number=first + at) for at, row in enumerate(rows)]

    @property
    def _device(self) -> torch.device:
        return torch.device(torch_device(self.ctx.device))

    @property
    def _precision(self) -> str:
        return pick_precision(self.settings.precision, self._device)

    def _ask_all(self, rows: Sequence[Row], folder: Any) -> None:
        """Run the teacher on all `rows`; put what it says into the empty `folder`."""
        groups = group_by_length(rows, len(rows), _TOKENS, None)
        with ExitStack() as stack:
            stack.enter_context(threads(self.ctx.threads))
            stack.enter_context(torch.inference_mode())
            stack.enter_context(autocast(self._precision, self._device))
            stack.callback(self.teacher.to, "cpu")
            self.teacher.to(self._device)
            writer = stack.enter_context(
                Writer(folder, rows, self.words, self.top, self.settings.temperature)
            )
            for done, group in enumerate(groups, start=1):
                batch = collate([rows[i] for i in group], self.config)
                there = {name: value.to(self._device) for name, value in batch.items()}
                writer.put(group, self.ask(self.teacher, there).float())
                self.ctx.progress(done, len(groups), "the teacher reads")
