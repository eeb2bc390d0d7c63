"""The stage `simplify`: onnxsim on a graph of somebody else, kept only where it computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

from pydantic import Field

from smelt.core.artifact import Artifact, Format
from smelt.core.data import EVERY_TASK, Task
from smelt.core.errors import RunError
from smelt.core.memory import available_bytes
from smelt.core.stage import Context, Need, Settings
from smelt.export.foreign.carry import carry, copy_graphs
from smelt.runtime.foreign.limits import FailedError, Limits, ask
from smelt.runtime.foreign.take import NAME

_ALLOWED = 1e-4  # largest difference, of an output's standard deviation
_ROWS = 16
_SLACK_BYTES = 100_000  # the shapes that onnxsim writes down
_LEAST_BYTES = 1_500_000_000
_SHARE = 0.5  # of the memory that is free


class SimplifySettings(Settings):
    """Settings of `simplify`."""

    seconds: float = Field(default=300.0, gt=0, le=86_400, description="of the processor that it may take")
    memory_gb: float | None = Field(
        default=None, gt=0, description="that it may take; none: half of what is free"
    )


class Simplify:
    """Fold constants and drop what does nothing, in an ONNX model that somebody else exported.

    onnxsim runs in a process of its own with a limit of time and of memory. Its graph is kept where it gives
    the same on rows of the data, with their padding, and is not larger; otherwise the graph stays as it was,
    and a warning says why. Rows are taken from calibration, validation or train.

        - simplify: {}
        - simplify: {seconds: 60, memory_gb: 4}
    """

    name: ClassVar[str] = "simplify"
    accepts: ClassVar[frozenset[Format]] = frozenset({"onnx"})
    produces: ClassVar[Format] = "onnx"
    needs: ClassVar[frozenset[Need]] = frozenset()
    source: ClassVar[str] = "github.com/daquexian/onnx-simplifier"
    version: ClassVar[int] = 1
    foreign: ClassVar[bool] = True
    settings_type: ClassVar[type[Settings]] = SimplifySettings
    tasks: ClassVar[frozenset[Task]] = frozenset(EVERY_TASK)

    def __call__(self, src: Artifact, settings: SimplifySettings, ctx: Context) -> None:
        """Write the simplified graph, or the same one, into `ctx.out`."""
        from smelt.export.foreign.rows import require_one_graph
        from smelt.export.graph_files import data_file, read_graph

        require_one_graph(src, self.name)
        carry(src, ctx)
        before = len(read_graph(src.path / NAME, values=False).graph.node)
        with TemporaryDirectory(dir=ctx.out.parent, prefix=".simplify-") as folder:
            candidate = Path(folder, NAME)
            reason = _simplify(src, candidate, settings) or _refusal(src, candidate, ctx)
            if reason is None:
                for path in (candidate, data_file(candidate)):
                    if path.is_file():
                        path.rename(ctx.out / path.name)
        if reason is not None:
            ctx.warnings.append(f"not simplified: {reason}")
            copy_graphs(src, ctx)
        after = len(read_graph(ctx.out / NAME, values=False).graph.node)
        ctx.facts.update(nodes=after, nodes_before=before)


def _simplify(src: Artifact, candidate: Path, settings: SimplifySettings) -> str | None:
    """Write what onnxsim makes of the graph as `candidate`; return why there is nothing."""
    free = max(_LEAST_BYTES, int(_SHARE * available_bytes()))
    memory = free if settings.memory_gb is None else int(settings.memory_gb * 1e9)
    try:
        said = ask(__name__, [str(src.path / NAME), str(candidate)], Limits(memory, settings.seconds))
    except FailedError as error:
        return f"onnxsim was stopped: {error}"
    return None if said is None else str(said)


def answer(arguments: Sequence[str]) -> str | None:
    """Simplify the graph in the first file into the second, in this process; return why not, or None."""
    from smelt.export.graph_files import write_graph
    from smelt.export.simplify import simplified

    source, target = map(Path, arguments)
    with TemporaryDirectory(dir=target.parent) as folder:
        after = simplified(source, Path(folder))
        if isinstance(after, str):
            return after
        write_graph(after, target)
    return None


def _refusal(src: Artifact, candidate: Path, ctx: Context) -> str | None:
    """Say why the simplified graph is not kept, or None."""
    from smelt.export.foreign.rows import difference, rows_of, run_graph
    from smelt.export.graph_files import data_file

    def size(path: Path) -> int:
        return sum(file.stat().st_size for file in (path, data_file(path)) if file.is_file())

    if size(candidate) > 1.05 * size(src.path / NAME) + _SLACK_BYTES:
        return f"onnxsim made it larger ({size(src.path / NAME):,} to {size(candidate):,} bytes)"
    feeds, real = rows_of(src, ctx, _ROWS)
    if not real:
        ctx.warnings.append("the simplified graph was compared on made-up rows: there are none but test")
    try:
        got, wanted = (run_graph(path, feeds, ctx.threads) for path in (candidate, src.path / NAME))
        off = difference(got, wanted)
    except (RunError, KeyError) as error:
        return f"the simplified graph does not run: {error}"
    if not off <= _ALLOWED:
        return f"it computes something else (relative difference {off:.2g})"
    ctx.facts["parity"] = {"rows": sum(len(next(iter(one.values()))) for one in feeds), "relative": off}
    return None
