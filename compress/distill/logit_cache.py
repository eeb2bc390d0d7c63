"""Cache a teacher's outputs in the store: the teacher runs once per sample, for all epochs and recipes.

The files are written once, in any order, and read per sample. For tokens they hold the k largest logits of
each position, relative to the largest, as float16, their token ids, and in float32 the logarithm of the sum
over all others at temperature T; if k is the size of the vocabulary, all logits in order. For classes and
embeddings they hold everything, in float32.

`top_k_loss` compares k + 1 probabilities: each of the k largest logits has a bucket of its own, all others
share one bucket, the tail. Without the tail the student would learn that only the k tokens are possible
(Anshumann et al. 2025, Sparse Logit Sampling, arXiv:2503.16870, who show the bias and call the tail a ghost
token). Within the tail the student keeps its own proportions.

Arrays are written with `write` calls (a full disk raises OSError, where a page of a mapped file would end the
process) and memory-mapped for reading.

Shapes: N = positions of all samples (one for a classifier's sample, two for a pair of texts that are embedded
separately), W = cached values per position, B = samples of a batch, T = positions of its longest sample,
V = vocabulary, k = kept logits.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smelt.compress.distill.settings import DistillSettings
from smelt.core.errors import RunError
from smelt.core.process_group import process_count, process_rank
from smelt.runtimes.device import torch_device, torch_threads
from smelt.stage import Context
from smelt.tasks.samples import CACHE_INDEX_KEY, EncodedSample, collate, group_by_length
from smelt.training.losses import blockwise_loss
from smelt.training.training_state import autocast, pick_precision


class NpyFile:
    """A .npy file of shape `shape`, whose rows can be written in any order, also by several processes."""

    def __init__(self, path: Path, dtype: str, shape: Sequence[int]) -> None:
        # Not truncated: each process writes the same header, and its own rows. Not readable: NFS would read
        # whole pages, and write back the rows of other machines.
        self._stream: BinaryIO = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb")
        self.dtype = np.dtype(dtype)
        header = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": tuple(shape),
        }
        np.lib.format.write_array_header_1_0(self._stream, header)
        self._start = self._stream.tell()
        self._row_bytes = self.dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))

    def write(self, first_row: int, values: NDArray[Any]) -> None:
        """Write `values`, [n, ...], starting at row `first_row`."""
        self._stream.seek(self._start + first_row * self._row_bytes)
        self._stream.write(np.ascontiguousarray(values, dtype=self.dtype).tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def open_mapped(path: Path) -> NDArray[Any]:
    """Return the array in `path`, memory-mapped; nothing is unpickled."""
    array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


_MIN_LOG_PROBABILITY = -1e4  # of the teacher's log-probabilities, as in `token_loss`


@dataclass(frozen=True)
class TopKLogits:
    """Top-k logits of a teacher at temperature T.

    logits: float32 [..., k + 1], divided by T: the k largest, then the logarithm of the sum of the
    exponentials of all others. ids: int64 [..., k], token ids of the largest, each once.
    """

    logits: Tensor
    ids: Tensor


def top_k_logits(logits: Tensor, top: int, temperature: float) -> TopKLogits:
    """Return the top-k buckets of `logits`, float [..., V] with V > `top`, relative to the largest logit."""
    values, ids = logits.float().topk(top, dim=-1)
    remaining = logits.float().scatter(-1, ids, float("-inf")) - values[..., :1]
    tail = (remaining / temperature).logsumexp(dim=-1, keepdim=True)
    return TopKLogits(torch.cat([(values - values[..., :1]) / temperature, tail], dim=-1), ids)


def _weighted_divergences(
    z: Tensor, theirs: Tensor, ids: Tensor, weights: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Return the two weighted divergences per row, [rows, 2], and the gradient of their sum by z, [rows, V].

    With b(j) the bucket of token j and r the student's proportions within the tail,
    d KL(p || q) / dz_j = q_j - p_b(j) (of the tail q_j - p_tail r_j), and
    d KL(q || p) / dz_j = q_j (log q_b(j) - log p_b(j) - KL).

    Args:
        z: the student's logits over T, float32 [rows, V].
        theirs: the teacher's log-probabilities of the buckets, float32 [rows, k + 1].
        ids: int64 [rows, k].
        weights: of KL(teacher || student) and KL(student || teacher).
    """
    forward, reverse = weights
    logq = z.log_softmax(dim=1)
    tail_logits = logq.scatter(1, ids, float("-inf"))  # the tail's tokens, relative to all
    tail = tail_logits.logsumexp(dim=1, keepdim=True)
    student_buckets = torch.cat([logq.gather(1, ids), tail], dim=1)
    p, q, token_probs = theirs.exp(), student_buckets.exp(), logq.exp()
    values, slope = z.new_zeros(len(z), 2), torch.zeros_like(z)
    if forward:
        values[:, 0] = forward * torch.where(p > 0, p * (theirs - student_buckets), 0.0).sum(dim=1)
        forward_slope = token_probs - p[:, -1:] * (tail_logits - tail).exp()
        slope += forward * forward_slope.scatter_(1, ids, (q - p)[:, :-1])
    if reverse:
        ratio = torch.where(q > 0, student_buckets - theirs.clamp(min=_MIN_LOG_PROBABILITY), 0.0)
        reverse_values = (q * ratio).sum(dim=1, keepdim=True)
        values[:, 1] = reverse * reverse_values.squeeze(1)
        reverse_slope = token_probs * (ratio[:, -1:] - reverse_values)
        slope += reverse * reverse_slope.scatter_(1, ids, (q * (ratio - reverse_values))[:, :-1])
    return values, slope


def top_k_loss(
    logits: Tensor,
    labels: Tensor,
    teacher: TopKLogits,
    *,
    temperature: float,
    logits_weight: float,
    reverse_weight: float = 0.0,
    terms: dict[str, Tensor] | None = None,
) -> Tensor:
    """Return logits_weight * T^2 * KL(teacher || student) + reverse_weight * T^2 * KL(student || teacher).

    Both are computed over the buckets and averaged over the positions whose label is not -100.

    Args:
        logits: float [..., V] of the student.
        labels: int64 [...]; positions with label -100 are ignored.
        teacher: made at the same temperature; no gradient flows into it.
        temperature: T.
        logits_weight: weight of KL(teacher || student).
        reverse_weight: weight of KL(student || teacher).
        terms: receives the terms with a weight, `logits` and `reverse_kl`, as detached float32 scalars.

    Returns:
        float32 scalar, nats.
    """
    weights = (logits_weight, reverse_weight)
    k = teacher.ids.shape[-1]
    teacher_logits, ids = teacher.logits.detach().reshape(-1, k + 1), teacher.ids.reshape(-1, k)

    def of_rows(z: Tensor, selection: slice, mask: Tensor) -> tuple[Tensor, Tensor]:
        values, slope = _weighted_divergences(
            z / temperature, teacher_logits[selection].float().log_softmax(dim=1), ids[selection], weights
        )
        return temperature**2 * values[mask].double().sum(dim=0), slope.mul_(temperature)

    loss, parts = blockwise_loss(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), 2, of_rows)
    if terms is not None:
        names = ("logits", "reverse_kl")
        terms.update({n: value for n, value, weight in zip(names, parts, weights, strict=True) if weight})
    return loss


_VALUES_FILE, _IDS_FILE, _REST_FILE = "values.npy", "ids.npy", "rest.npy"
_MAX_UINT16_TOKENS = 2**16  # token ids that fit into 16 bits


def row_offsets(samples: Sequence[EncodedSample]) -> NDArray[np.int64]:
    """Return the first position of each sample, then the number of all positions, int64 [samples + 1]."""
    return np.cumsum([0, *map(_count_positions, samples)], dtype=np.int64)


def _count_positions(row: EncodedSample) -> int:
    if isinstance(row.target, list):
        return len(row.target)
    if row.target is None:
        return len(row.input_ids) - 1
    return 1 if row.second_ids is None else 2


def teacher_inputs_fingerprint(samples: Sequence[EncodedSample]) -> str:
    """Return a hash of the teacher's inputs in `samples`, token ids or images.

    Labels of classes and scores are not part of it.
    """
    digest = hashlib.sha256()
    for sample in samples:
        target = sample.target if isinstance(sample.target, list) else []
        parts = (sample.input_ids, sample.token_type_ids or [], target, sample.second_ids or [])
        ids = [
            len(parts[0]),
            len(parts[1]),
            len(parts[2]),
            len(parts[3]),
            *(i for sequence in parts for i in sequence),
        ]
        digest.update(np.asarray(ids, dtype=np.int64).tobytes())
        digest.update(sample.content.encode())
    return digest.hexdigest()


class LogitCacheWriter:
    """Writes a teacher's outputs for samples into an empty folder.

    words: size of the vocabulary, of which the `top_k` largest logits are stored at a temperature; None for
    classes or embeddings.
    """

    def __init__(
        self, folder: Path, samples: Sequence[EncodedSample], words: int | None, top: int, temperature: float
    ) -> None:
        self.folder, self.starts = folder, row_offsets(samples)
        self.words, self.top, self.temperature = words, top, temperature
        self.files: dict[str, NpyFile] = {}
        self._stack = ExitStack()

    def write(self, places: Sequence[int], outputs: Tensor) -> None:
        """Write the outputs for the samples at `places`: float [B, T, V], [B, C], [B, D]; pairs [2 B, D]."""
        if self.words is None:
            parts = {_VALUES_FILE: outputs.cpu().numpy()}
            self._create_files(parts, {_VALUES_FILE: "<f4"})
            pairs = len(outputs) == 2 * len(places)
            for index, sample in enumerate(places):
                row_indices = [index, len(places) + index] if pairs else [index]
                self.files[_VALUES_FILE].write(int(self.starts[sample]), parts[_VALUES_FILE][row_indices])
            return
        parts, kinds = self._top_k_arrays(outputs)
        self._create_files(parts, kinds)
        for index, sample in enumerate(places):
            start, end = (int(x) for x in self.starts[sample : sample + 2])
            for name, values in parts.items():
                self.files[name].write(start, values[index, : end - start])

    def _top_k_arrays(self, logits: Tensor) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
        assert self.words is not None
        if self.top >= self.words:
            values = logits - logits.amax(dim=-1, keepdim=True)
            return {_VALUES_FILE: values.half().cpu().numpy()}, {_VALUES_FILE: "<f2"}
        top_k = top_k_logits(logits, self.top, self.temperature)
        values, tail = top_k.logits[..., :-1] * self.temperature, top_k.logits[..., -1:]
        parts = {
            _VALUES_FILE: values.half().cpu().numpy(),
            _IDS_FILE: top_k.ids.cpu().numpy(),
            _REST_FILE: tail.cpu().numpy(),
        }
        return parts, {
            _VALUES_FILE: "<f2",
            _IDS_FILE: "<u2" if self.words <= _MAX_UINT16_TOKENS else "<i4",
            _REST_FILE: "<f4",
        }

    def _create_files(self, parts: dict[str, NDArray[Any]], kinds: dict[str, str]) -> None:
        """Create the files at their full size, when the first batch has defined their width.

        Raises:
            RunError: not enough space on the disk.
        """
        if self.files:
            return
        count = int(self.starts[-1])
        widths = {name: values.shape[-1] for name, values in parts.items()}
        needed_bytes = sum(count * width * np.dtype(kinds[name]).itemsize for name, width in widths.items())
        free_bytes = shutil.disk_usage(self.folder).free
        if needed_bytes > free_bytes:
            remedy = "a smaller top_k or " if self.words is not None else ""
            raise RunError(
                f"distill: cache_logits: the teacher's outputs for {len(self.starts) - 1:,} samples"
                f" need {needed_bytes / 1e6:,.1f} MB in the store, but only {free_bytes / 1e6:,.1f} MB are"
                f" free. Use {remedy}another --store, or remove cache_logits; the teacher then"
                " runs in each epoch.",
                code="disk-full",
                setting="cache_logits",
            )
        for name, width in widths.items():
            file = NpyFile(self.folder / name, kinds[name], (count, width))
            self.files[name] = self._stack.enter_context(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class LogitCache:
    """Cached outputs in `folder`; memory-mapped, read from the disk on access."""

    def __init__(self, folder: Path, samples: Sequence[EncodedSample], temperature: float) -> None:
        self.starts, self.temperature = row_offsets(samples), temperature
        self.values = open_mapped(folder / _VALUES_FILE)
        self.ids = open_mapped(folder / _IDS_FILE) if (folder / _IDS_FILE).is_file() else None
        self.rest = open_mapped(folder / _REST_FILE) if (folder / _REST_FILE).is_file() else None

    @property
    def size_bytes(self) -> int:
        """The size of the arrays in bytes."""
        return sum(array.nbytes for array in (self.values, self.ids, self.rest) if array is not None)

    def read_outputs(self, places: Sequence[int]) -> Tensor:
        """Return float32 [B, C] of classes, or embeddings [B, D], or [2 B, D]: all first texts first."""
        starts = self.starts[list(places)]
        counts = self.starts[[index + 1 for index in places]] - starts
        row_indices = [*starts, *(starts + 1)] if counts.min() == 2 else list(starts)
        return torch.from_numpy(self.values[row_indices])

    def read_token_logits(self, places: Sequence[int], size: int) -> Tensor | TopKLogits:
        """Return the outputs at the positions of each sample, padded with zeros to `size`: see `TopKLogits`.

        If all logits are cached: the logits, float32 [B, T, V].
        """
        values = self._padded(self.values, places, size).float()
        if self.ids is None or self.rest is None:
            return values
        tail = self._padded(self.rest, places, size)
        ids = self._padded(self.ids, places, size)
        return TopKLogits(torch.cat([values / self.temperature, tail], dim=-1), ids)

    def _padded(self, array: NDArray[Any], places: Sequence[int], size: int) -> Tensor:
        dtype = array.dtype if array.dtype.kind == "f" else np.dtype(np.int64)
        padded = np.zeros((len(places), size, array.shape[1]), dtype=dtype)
        for row, index in zip(padded, places, strict=True):
            start, end = self.starts[index], self.starts[index + 1]
            row[: end - start] = array[start:end]
        return torch.from_numpy(padded)


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
            ctx: device, threads, progress, the store; receives the detail `cache_logits`.
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
        self, samples: Sequence[EncodedSample], validation: Sequence[EncodedSample] | None
    ) -> tuple[list[EncodedSample], list[EncodedSample] | None]:
        """Return the samples with cache indices; runs the teacher on samples that are not cached."""
        self._parts.clear()
        train_samples = self._open_cache(samples, 0)
        return train_samples, None if validation is None else self._open_cache(validation, len(samples))

    def outputs(self, batch: Mapping[str, Tensor]) -> Tensor | TopKLogits:
        """Return the teacher's outputs for the samples of `batch`."""
        indices, labels = batch[CACHE_INDEX_KEY].tolist(), batch["labels"]
        offset, cached = next(entry for entry in reversed(self._parts) if entry[0] <= indices[0])
        local_indices = [index - offset for index in indices]
        self._asked += len(local_indices)
        if self.words is None:
            return cached.read_outputs(local_indices).to(labels.device)
        token_logits = cached.read_token_logits(local_indices, labels.shape[1])
        if isinstance(token_logits, Tensor):
            return token_logits.to(labels.device)
        return TopKLogits(token_logits.logits.to(labels.device), token_logits.ids.to(labels.device))

    def close(self) -> None:
        """Close the files; report and log how often the cache was used."""
        size = sum(cache.size_bytes for cache in self._open.values())
        rate = max(0.0, 1 - self._run / self._asked) if self._asked else 0.0
        self.ctx.details["cache_logits"] = {
            "bytes": size,
            "positions": sum(int(cache.starts[-1]) for cache in self._open.values()),
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

    def _open_cache(self, samples: Sequence[EncodedSample], first: int) -> list[EncodedSample]:
        key = teacher_inputs_fingerprint(samples)
        if key not in self._open:
            is_top_k = self.words is not None and self.top < self.words
            cache_key = {
                "what": f"teacher outputs for {len(samples):,} samples",
                "version": LOGITS_VERSION,
                "rows": key,
                "top_k": self.top if is_top_k else None,
                "temperature": self.settings.temperature if is_top_k else None,
                "precision": self._precision,
                "device": self._device.type,
                **self.who,
            }
            folder, cached = self._stack.enter_context(
                self.ctx.cached_files(cache_key, lambda to: self._run_teacher(samples, to))
            )
            self._run += 0 if cached else len(samples)
            self._open[key] = LogitCache(folder, samples, self.settings.temperature)
        self._parts.append((first, self._open[key]))
        return [replace(row, cache_index=first + index) for index, row in enumerate(samples)]

    @property
    def _device(self) -> torch.device:
        return torch.device(torch_device(self.ctx.device))

    @property
    def _precision(self) -> str:
        return pick_precision(self.settings.precision, self._device)

    def _run_teacher(self, samples: Sequence[EncodedSample], folder: Any) -> None:
        """Run the teacher on `samples`; write its outputs into `folder`. Processes divide the batches."""
        groups = group_by_length(samples, len(samples), _MAX_BATCH_TOKENS, None)
        with ExitStack() as stack:
            stack.enter_context(torch_threads(self.ctx.threads))
            stack.enter_context(torch.inference_mode())
            stack.enter_context(autocast(self._precision, self._device))
            stack.callback(self.teacher.to, "cpu")
            self.teacher.to(self._device)
            writer = stack.enter_context(
                LogitCacheWriter(folder, samples, self.words, self.top, self.settings.temperature)
            )
            rank_groups = groups[process_rank() :: process_count()]
            for done, group in enumerate(rank_groups, start=1):
                batch = collate([samples[i] for i in group], self.config)
                on_device = {name: value.to(self._device) for name, value in batch.items()}
                writer.write(group, self.ask(self.teacher, on_device).float())
                self.ctx.progress(done, len(rank_groups), "running the teacher")
