"""`smelt bench`: artifacts side by side, in rounds that alternate with those of the first."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import Artifact, read_artifact
from smelt.core.data import CUSTOM, IMAGES
from smelt.core.errors import InputError
from smelt.core.messages import as_json
from smelt.core.stage import Progress, silent
from smelt.runtime.foreign.tried import require_safe

if TYPE_CHECKING:
    from smelt.evaluate.latency import LatencySettings

_WIDTH = 80
DOUBT = "?"  # behind a speed-up whose times were disturbed
# Headings of what a call goes into; first and more are tokens.
_PARTS = {
    "tokenizing_ms": "tokenizing",
    "encoding_ms": "encoding",
    "time_to_first_token_ms": "to first",
    "time_per_output_token_ms": "each more",
    "detokenizing_ms": "to text",
    "model_ms": "model",
    "rest_ms": "labels",
}
# What is timed where no data are named: sentences of 3 to 43 words. They are English; a model for
# another language splits them into more pieces, so times on the data of one's own say more.
STANDARD_TEXTS = (
    "It is late.",
    "Where is the station?",
    "She reads a book every evening.",
    "A man is riding a bicycle along the river.",
    "Two children in red coats are building a snowman in the park.",
    "The shop on the corner opens at nine in the morning and closes at six.",
    "I was told that the train to the airport leaves from the other side of the platform today.",
    "Although the film was far too long, the actors played so well that nobody wanted to leave early.",
    "After three days of heavy rain the old bridge was closed, and everybody had to take the road through"
    " the hills.",
    "Most of the people who came to the meeting had read the report, but only a few of them agreed with what"
    " it said about the schools.",
    "The museum, which was built more than a hundred years ago by a merchant who loved paintings, shows works"
    " of young artists from all over the country in the summer months.",
    "When the wind turned in the night, the fishermen pulled their boats up the beach, tied them to the posts"
    " behind the harbour wall, and waited in the small café until the first light let them see how high"
    " the waves had become.",
)


def bench(
    folders: Sequence[Path],
    data: Path | None = None,
    column: str | None = None,
    settings: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    device: str = "auto",
    progress: Progress = silent,
    trust_engine: bool = False,
) -> dict[str, Any]:
    """Time the artifacts in `folders` on the same texts; the first is what the others are compared with.

    Args:
        folders: artifacts of one task.
        data: a file with rows, or with one text a line (.txt); None: `STANDARD_TEXTS`.
        column: where the texts are called otherwise than in a recipe.
        settings: of `smelt.evaluate.latency.LatencySettings`.
        generation: of `smelt.runtime.generate.settings.Generation`.
        device: auto, cpu or cuda.
        progress: told of every round.
        trust_engine: as of `smelt.load`.

    Returns:
        What `smelt bench --json` prints: baseline, texts, environment and, by artifact, where it is, its
        size and its rows (as report.json's `latency`) or its error.

    Raises:
        InputError: no artifact there, artifacts of different tasks, no texts, unknown settings.
    """
    from smelt.evaluate.environment import environment
    from smelt.evaluate.latency import LatencySettings, measure
    from smelt.look.machine import device_of
    from smelt.use.loaded import generation_of

    artifacts = open_artifacts(folders)
    for artifact in artifacts.values():
        require_safe(artifact, trust_engine)
    task: Any = next(iter(artifacts.values())).manifest.task
    devices = {name: device_of(artifact, device) for name, artifact in artifacts.items()}
    chosen = LatencySettings(**(settings or {}))
    baseline = next(iter(artifacts))
    with _rows(data, task, column, artifacts[baseline], chosen) as (texts, arrays):
        result = measure(
            {name: artifact.path for name, artifact in artifacts.items()},
            baseline,
            texts,
            chosen,
            task,
            generation=generation_of(dict(generation or {})),
            progress=progress,
            device=device,
            arrays=arrays,
        )
    errors = {name: as_json([found])[0] for name, found in result.errors.items()}
    return {
        "baseline": baseline,
        "task": task,
        "texts": {"from": str(data) if data else "standard", "n": len(texts)},
        "settings": chosen.model_dump(mode="json"),
        "environment": environment(),
        "artifacts": {
            name: {
                "folder": str(artifact.path),
                "key": artifact.key,
                "format": artifact.format,
                "target": artifact.manifest.details.get("target"),
                "runner": result.runners.get(name),
                "device": devices[name],
                "size_bytes": artifact.size_bytes,
                "peak_memory_bytes": result.peak_memory_bytes.get(name),
                "error": errors.get(name),
                "latency": result.rows.get(name, []),
            }
            for name, artifact in artifacts.items()
        },
    }


@contextlib.contextmanager
def _rows(
    data: Path | None, task: str, column: str | None, artifact: Artifact, settings: LatencySettings
) -> Iterator[tuple[list[str], Path | None]]:
    """Yield the texts to be timed; of arrays the places of rows, and a file with them."""
    if task == IMAGES:
        from smelt.use.predict_data import read_examples

        if data is None:
            raise InputError(
                "--data: name images to be timed on: a folder of classes, or rows that name files.",
                code="missing-data",
            )
        yield [e.text for e in read_examples(data, task, () if column is None else (column,))], None
        return
    if task != CUSTOM:
        yield list(STANDARD_TEXTS) if data is None else read_texts(data, task, column), None
        return
    from smelt.execute.latency_scores import timed_rows
    from smelt.use.arrays import read_rows

    with timed_rows(read_rows(data, artifact), settings) as (split, path):
        yield [example.text for example in split.examples], path


def read_texts(path: Path, task: str, column: str | None = None) -> list[str]:
    """Return the texts of a file: its lines (.txt), or a column of its rows.

    Raises:
        InputError: the file cannot be read, has no such column, or holds no text.
    """
    from smelt.core.data import Columns
    from smelt.core.errors import nearest
    from smelt.core.rows.reading import read_file
    from smelt.core.rows.text_files import file_kind, read_text_file
    from smelt.look.data import guess_column

    if not path.is_file():
        code, what = (
            ("not-a-file", "a folder, not a file of rows")
            if path.is_dir()
            else ("missing-file", "no such file")
        )
        raise InputError(f"{path}: {what} (--data).", code=code, file=str(path))
    if file_kind(path) == ".txt":
        found = [line for line in read_text_file(path).splitlines() if line.strip()]
    else:
        role = "source" if task in ("translation", "summarization") else "text"
        found = []
        for where, row in read_file(path):
            name = column or guess_column(row, role) or getattr(Columns(), role)
            if not isinstance(row.get(name), str):
                hint = nearest(name, map(str, row))
                raise InputError(
                    f"{where}: no text in a column '{name}'; there are: {', '.join(map(str, row))}.{hint}"
                    " Name the right one with --column.",
                    code="missing-column",
                ).at(where)
            found.append(str(row[name]))
    if not found:
        raise InputError(f"{path}: no texts in this file.", code="empty-data", file=str(path))
    return found


def bench_text(result: Mapping[str, Any]) -> str:
    """Return the table: a block per batch size, at most 80 columns."""
    artifacts = result["artifacts"]
    unit = next((row["unit"] for a in artifacts.values() for row in a["latency"]), "texts/s")
    room = min(25, max(len("artifact"), *map(len, artifacts)))
    lines = [f"{'artifact':{room}} {'batch':>5} {'p50 ms':>8} {'p90 ms':>8} {unit:>11} {'speed-up':>18}"]
    lines.append("─" * len(lines[0]))
    sizes = result["settings"]["batch_sizes"]
    for at, size in enumerate(sizes):
        lines += [""] if at else []
        for name, artifact in artifacts.items():
            row = next((row for row in artifact["latency"] if row["batch_size"] == size), None)
            lines.append(_line(_cut(name, room).ljust(room), size, row, name == result["baseline"]))
    lines += _parts_table(artifacts, sizes[0], room, result["task"])
    counts = sorted({row["threads"] for a in artifacts.values() for row in a["latency"]})
    threads = " and ".join(map(str, counts)) or "no"
    places = ", ".join(sorted({a["device"] for a in artifacts.values()}))
    texts, cpu = result["texts"], result["environment"]["cpu"]
    used = max((row["texts"] for a in artifacts.values() for row in a["latency"]), default=texts["n"])
    count = f"{used:,} of {texts['n']:,}" if used < texts["n"] else f"{texts['n']:,}"
    ways = {CUSTOM: ("arrays to arrays", "rows"), IMAGES: ("image file to label", "images")}
    way, rows = ways.get(result["task"], ("text to text", "texts"))
    notes = [
        f"From {way}. The rounds of each alternate with those of '{result['baseline']}', which the"
        f" speed-up is against; [95 % interval]. {count} {rows} ({texts['from']}),"
        f" {threads} thread{'s' * (counts != [1])}, {places}, {cpu}."
    ]
    notes += [f"{name}: {a['error']['message']}" for name, a in artifacts.items() if a["error"]]
    doubts: dict[str, list[str]] = {}
    for name, a in artifacts.items():
        for row in a["latency"]:
            if not row["stable"]:
                doubts.setdefault(row["reason"], []).append(f"{name}, batch {row['batch_size']}")
    if doubts:
        said = f"{DOUBT} No speed is claimed; try again when the machine is quiet. "
        notes.append(said + "; ".join(f"{'; '.join(who)}: {why}" for why, who in doubts.items()) + ".")
    return "\n".join([*lines, "", *(part for note in notes for part in textwrap.wrap(note, _WIDTH))])


def _line(name: str, size: int, row: Mapping[str, Any] | None, baseline: bool) -> str:
    if row is None:
        return f"{name} {size:>5} {'–':>8} {'–':>8} {'–':>11} {'–':>18}"
    ratio = "–"
    if row["speedup"] is not None:
        low, high = row["speedup_ci95"]
        doubt = "" if row["stable"] else DOUBT
        ratio = "1" if baseline else f"{_number(row['speedup'])}{doubt} [{_number(low)}, {_number(high)}]"
    return (
        f"{name} {size:>5} {_number(row['p50_ms']):>8} {_number(row['p90_ms']):>8}"
        f" {_number(row['throughput']):>11} {ratio:>18}"
    )


def _parts_table(artifacts: Mapping[str, Any], size: int, room: int, task: str) -> list[str]:
    """Return what the median call at batch `size` goes into; nothing where no runner shows it."""
    rows = {name: row for name, a in artifacts.items() for row in a["latency"] if row["batch_size"] == size}
    timed = {name: row["parts"] for name, row in rows.items() if row["parts"]}
    if not timed:
        return []
    columns = [key for key in next(iter(timed.values())) if key in _PARTS]
    heads = _PARTS | ({"tokenizing_ms": "decoding"} if task == IMAGES else {})
    lines = ["", f"{f'ms, batch {size}':{room}}" + "".join(f"{heads[key]:>11}" for key in columns)]
    for name, parts in timed.items():
        cells = ("–" if parts[key] is None else _number(parts[key]) for key in columns)
        lines.append(_cut(name, room).ljust(room) + "".join(f"{cell:>11}" for cell in cells))
    return lines


def _number(value: float) -> str:
    """Return three significant digits, as many as rounds agree on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1] + "…"


def open_artifacts(folders: Sequence[Path]) -> dict[str, Artifact]:
    """Return the artifacts by a short name: the folder's, with the run's where that is not unique.

    Raises:
        InputError: no artifact there, one is named twice, or they are of different tasks.
    """
    paths = [Path(folder).expanduser() for folder in folders]
    if not paths:
        raise InputError("bench: no artifact is named.", code="missing-setting")
    for name in (lambda p: p.name, lambda p: f"{p.absolute().parent.parent.name}/{p.name}", str):
        names = [name(path) for path in paths]
        if len(set(names)) == len(names):
            break
    else:
        raise InputError(f"bench: an artifact is named twice: {', '.join(names)}.", code="duplicate-artifact")
    found = {name: read_artifact(path) for name, path in zip(names, paths, strict=True)}
    for artifact in found.values():
        artifact.verify()
    tasks = {name: artifact.manifest.task for name, artifact in found.items()}
    if len(set(tasks.values())) > 1:
        said = ", ".join(f"{name} is for {task}" for name, task in tasks.items())
        raise InputError(
            f"bench: only artifacts of one task can be compared; {said}.", code="different-tasks"
        )
    return found
