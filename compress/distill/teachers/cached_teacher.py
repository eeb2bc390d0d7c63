"""Cache a teacher's outputs in the store: it runs once per sample, for all epochs and recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from smelt.compress.distill.losses.top_k import TopKLogits
from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.teachers.logit_cache import (
    LogitCache,
    LogitCacheWriter,
    teacher_inputs_fingerprint,
)
from smelt.compress.train.encoded_samples import CACHE_INDEX_KEY, EncodedSample, collate, group_by_length
from smelt.compress.train.training_state import autocast, pick_precision, torch_threads
from smelt.core.stage import Context
from smelt.runtime.backends.device import torch_device

LOGITS_VERSION = 1  # raise it whenever the same settings give other files
_MAX_BATCH_TOKENS = 4096  # in a batch of the teacher

# From a teacher and a batch to logits, float [B, T, V] or [B, C], or to embeddings of pairs, [2 B, D].
TeacherCall: TypeAlias = Callable[[Any, Mapping[str, Tensor]], Tensor]


class CachedTeacher:
    """Returns a teacher's outputs from the cache; runs the teacher on samples that are not cached."""

    def __init__(
        self,
        teacher: Any,
        config: Any,
        ask: TeacherCall,
        settings: DistillSettings,
        who: Mapping[str, Any],
        words: int | None,
        ctx: Context,
    ) -> None:
        """Prepare; the teacher is not run yet.

        Args:
            teacher: in eval mode, on the CPU.
            config: the student's, for batches.
            ask: runs the teacher on a batch.
            settings: of the step, with `cache_logits`.
            who: identifies the teacher; "artifacts" has the keys of the artifacts that it is made of.
            words: size of the vocabulary of its logits; None for logits of classes, or embeddings.
            ctx: device, threads, progress, the store; receives the detail `kept_logits`.
        """
        assert settings.cache_logits is not None
        self.teacher, self.config, self.ask, self.who = teacher, config, ask, who
        self.settings, self.words, self.ctx = settings, words, ctx
        self.top = settings.cache_logits.top_k
        self._stack = ExitStack()
        self._open: dict[str, LogitCache] = {}
        self._parts: list[tuple[int, LogitCache]] = []
        self._asked = self._run = 0

    def prepare_samples(
        self, rows: Sequence[EncodedSample], validation: Sequence[EncodedSample] | None
    ) -> tuple[list[EncodedSample], list[EncodedSample] | None]:
        """Return the samples with cache indices; runs the teacher on samples that are not cached."""
        self._parts.clear()
        first = self._open_cache(rows, 0)
        return first, None if validation is None else self._open_cache(validation, len(rows))

    def outputs(self, batch: Mapping[str, Tensor]) -> Tensor | TopKLogits:
        """Return the teacher's outputs for the samples of `batch`."""
        numbers, labels = batch[CACHE_INDEX_KEY].tolist(), batch["labels"]
        first, said = next(part for part in reversed(self._parts) if part[0] <= numbers[0])
        places = [number - first for number in numbers]
        self._asked += len(places)
        if self.words is None:
            return said.read_outputs(places).to(labels.device)
        found = said.read_token_logits(places, labels.shape[1])
        if isinstance(found, Tensor):
            return found.to(labels.device)
        return TopKLogits(found.logits.to(labels.device), found.ids.to(labels.device))

    def close(self) -> None:
        """Close the files; report and log how often the cache was used."""
        size = sum(said.size_bytes for said in self._open.values())
        rate = max(0.0, 1 - self._run / self._asked) if self._asked else 0.0
        self.ctx.details["cache_logits"] = {
            "bytes": size,
            "positions": sum(int(said.starts[-1]) for said in self._open.values()),
            "asked_rows": self._asked,
            "rows_of_teacher": self._run,
            "hit_rate": round(rate, 4),
        }
        self.ctx.log(
            f"  teacher cache: {size / 1e6:,.1f} MB replaced a run of the teacher for {rate:.1%} of"
            f" {self._asked:,} samples"
        )
        self._open.clear()
        self._parts.clear()
        self._stack.close()

    def _open_cache(self, rows: Sequence[EncodedSample], first: int) -> list[EncodedSample]:
        key = teacher_inputs_fingerprint(rows)
        if key not in self._open:
            cut = self.words is not None and self.top < self.words
            what = {
                "what": f"teacher outputs for {len(rows):,} samples",
                "version": LOGITS_VERSION,
                "rows": key,
                "top_k": self.top if cut else None,
                "temperature": self.settings.temperature if cut else None,
                "precision": self._precision,
                "device": self._device.type,
                **self.who,
            }
            folder, there = self._stack.enter_context(
                self.ctx.cached_files(what, lambda to: self._run_teacher(rows, to))
            )
            self._run += 0 if there else len(rows)
            self._open[key] = LogitCache(folder, rows, self.settings.temperature)
        self._parts.append((first, self._open[key]))
        return [replace(row, cache_index=first + at) for at, row in enumerate(rows)]

    @property
    def _device(self) -> torch.device:
        return torch.device(torch_device(self.ctx.device))

    @property
    def _precision(self) -> str:
        return pick_precision(self.settings.precision, self._device)

    def _run_teacher(self, rows: Sequence[EncodedSample], folder: Any) -> None:
        """Run the teacher on all `rows`; write its outputs into the empty `folder`."""
        groups = group_by_length(rows, len(rows), _MAX_BATCH_TOKENS, None)
        with ExitStack() as stack:
            stack.enter_context(torch_threads(self.ctx.threads))
            stack.enter_context(torch.inference_mode())
            stack.enter_context(autocast(self._precision, self._device))
            stack.callback(self.teacher.to, "cpu")
            self.teacher.to(self._device)
            writer = stack.enter_context(
                LogitCacheWriter(folder, rows, self.words, self.top, self.settings.temperature)
            )
            for done, group in enumerate(groups, start=1):
                batch = collate([rows[i] for i in group], self.config)
                there = {name: value.to(self._device) for name, value in batch.items()}
                writer.write(group, self.ask(self.teacher, there).float())
                self.ctx.progress(done, len(groups), "running the teacher")
