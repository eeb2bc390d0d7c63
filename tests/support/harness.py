"""What most tests of a stage do: give it a context, run it, look at the model; and call the command line.

    ctx = harness.run(Prune(), PruneSettings(keep_ratio=0.5), folder, tmp_path / "out", data=rows)
    model = harness.model_of(ctx)
    harness.smelt("plan", recipe, code=2)

Tiny models to run it on are in models/ (`every_family.make` for any family), graphs in graphs/.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from smelt.core.artifact import Artifact
from smelt.data.splits import Split
from smelt.data.tasks import Task
from smelt.stage import Context
from tests.support.models import tiny


def make_context(
    out: Path, task: Task = "translation", data: Split | Mapping[str, Split] | None = None, **more: Any
) -> Context:
    """Return what a stage is given that writes to `out`, a folder that is made if need be.

    Args:
        out: where the stage writes.
        task: the task of the recipe.
        data: splits by name; a single one is for training and for validation.
        more: other fields of `Context`. Without them: seed 0, one thread, the CPU, no artifact above this
            one, and a score that knows no metric.
    """
    out.mkdir(parents=True, exist_ok=True)
    splits = {"train": data, "validation": data} if isinstance(data, Split) else dict(data or {})
    values: dict[str, Any] = {
        "seed": 0, "ancestors": {}, "score": lambda *_: {}, "threads": 1, "device": "cpu",
    }  # fmt: skip
    return Context(out=out, task=task, data=splits, **(values | more))


def run_stage(
    stage: Any,
    settings: Any,
    source: Path | Artifact,
    out: Path,
    task: Task = "translation",
    data: Split | Mapping[str, Split] | None = None,
    **more: Any,
) -> Context:
    """Run a stage on a model folder, or on an artifact, whose task then counts; return its context.

    What was made is in `ctx.out`, what it tells in `ctx.details` and `ctx.warnings`. The model that went in
    is the ancestor `model`, as in a recipe of one stage.
    """
    artifact = source if isinstance(source, Artifact) else tiny.as_artifact(source, task)
    ctx = make_context(out, artifact.manifest.task, data, **({"ancestors": {"model": artifact}} | more))
    stage(artifact, settings, ctx)
    return ctx


def load_output_model(ctx: Context) -> Any:
    """Return the model that a stage left, read from its folder."""
    from smelt.models.checkpoint import load_model

    return load_model(ctx.out)[0]


def fixed_ids(texts: int = 2) -> Any:
    """Return so many texts of nine fixed tokens, int64."""
    import torch

    return torch.randint(5, 20, (texts, 9), generator=torch.Generator().manual_seed(0))


def logits(model: Any, texts: int = 2) -> Any:
    """Return what a model of any kind makes of so many texts of nine fixed tokens (and five of output)."""
    import torch

    ids = fixed_ids(texts)
    decoder_inputs = {"decoder_input_ids": ids[:, :5]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(ids, **decoder_inputs).logits


def smelt(
    *arguments: Any, code: int | None = None, stdin: str | None = None, expect_bug: bool = False
) -> Any:
    """Run `smelt ARGUMENTS` in this process; return click's result (`exit_code`, `output`, ...).

    Its `error` is the error of smelt's own that the command ended with, or None.

    Fails when smelt ends by an exception of its own, or shows a traceback, or says that something happened
    which it did not foresee: no input may lead there.

    Args:
        arguments: of the command line; paths and numbers may be given as they are.
        code: the exit code that is expected; None: any.
        stdin: standard input.
        expect_bug: whether the test put a bug in, which smelt then may not have foreseen.
    """
    from click import Group
    from click.testing import CliRunner

    from smelt.cli.main import main
    from smelt.core.errors import SmeltError

    __tracebackhide__ = True
    errors: list[SmeltError] = []
    invoke = Group.invoke

    def listen(group: Group, ctx: Context) -> Any:
        try:
            return invoke(group, ctx)
        except SmeltError as error:
            errors.append(error)
            raise

    with patch.object(Group, "invoke", listen):
        result: Any = CliRunner().invoke(main, [*map(str, arguments)], input=stdin)
    result.error = errors[0] if errors else None
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert "Traceback" not in result.output, result.output
    assert expect_bug or "[unforeseen]" not in result.output, result.output
    assert code is None or result.exit_code == code, result.output
    return result


@contextmanager
def saved_models(observe: Callable[[Any], Any]) -> Iterator[list[Any]]:
    """Yield a list that collects `observe(model)` of each model saved inside the context."""
    from smelt.models import checkpoint

    models: list[Any] = []
    save = checkpoint.save_model

    def watched(model: Any, *arguments: Any, **more: Any) -> list[str]:
        models.append(observe(model))
        return save(model, *arguments, **more)

    _replace_in_modules(save, watched)
    try:
        yield models
    finally:
        _replace_in_modules(watched, save)


def _replace_in_modules(old: Any, new: Any) -> None:
    """Let all modules that hold `old` as `save_model` hold `new`, those too that are loaded meanwhile."""
    for name, module in list(sys.modules.items()):
        if name.startswith("smelt.") and vars(module).get("save_model") is old:
            module.save_model = new  # type: ignore[attr-defined]
