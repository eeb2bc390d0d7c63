"""Doing one step of a plan: take it from the store, or run the stage and put it there."""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import Artifact, Manifest
from smelt.core.data import Split
from smelt.core.errors import RunError, SmeltError
from smelt.core.files import hash_of, sha256_of
from smelt.core.stage import Context
from smelt.core.store import Store
from smelt.machine import gpu_names
from smelt.scoring import Scorer, library_versions

if TYPE_CHECKING:
    from smelt.display import Display
    from smelt.plan import Step
    from smelt.runtime.text_rules import TextRules

_LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "onnx",
    "onnxscript",
    "onnxsim",
    "onnxruntime-gpu",
    "onnxruntime",
    "tensorrt",
    "tensorrt-rtx",
)


@dataclass(frozen=True)
class Workshop:
    """What all steps of one run share. `validation` scores on the validation data."""

    store: Store
    task: Any
    data: Mapping[str, Split]
    seed: int
    threads: int | None
    validation: Scorer
    display: Display
    versions: Mapping[str, str] = field(default_factory=lambda: library_versions(_LIBRARIES))
    device: str = "auto"

    def import_root(
        self, source: Path, labels: list[str] | None, rules: TextRules, fresh: bool
    ) -> tuple[Artifact, bool]:
        """Bring the untouched model into the store; return it and whether it was there already."""
        from smelt.runtime.checkpoint import count_parameters, import_model
        from smelt.runtime.text_rules import write_text_rules

        names = sorted(p for p in source.iterdir() if p.is_file())
        key = hash_of(
            {
                "stage": "model",
                "version": 1,
                "files": {p.name: sha256_of(p) for p in names},
                "task": self.task,
                "labels": labels,
                "text": rules.model_dump(),
                "seed": self.seed,
            }
        )
        found = None if fresh else self.store.find(key)
        if found:
            return found, True
        self.store.remove(key)
        with self.store.workspace() as space:
            out = space / "out"
            out.mkdir()
            notes = import_model(source, out, labels, self.seed)
            write_text_rules(out, rules)
            manifest = Manifest(
                key=key,
                format="torch",
                task=self.task,
                stage="model",
                settings={},
                seed=self.seed,
                parent=None,
                versions=dict(self.versions),
                warnings=notes,
                facts={"parameters": count_parameters(out), **rules.model_dump(exclude_defaults=True)},
            )
            return self.store.commit(out, manifest), False

    def run_step(self, step: Step, ancestors: Mapping[str, Artifact], fresh: bool) -> tuple[Artifact, bool]:
        """Return the artifact of `step` and whether it was in the store already.

        Raises:
            SmeltError: the stage failed; nothing is left in the store.
        """
        parent = ancestors[step.parent]
        key = self.key(step, ancestors)
        found = None if fresh else self.store.find(key)
        if found:
            return found, True
        self.store.remove(key)
        with self.store.workspace() as space:
            return self._make(step, parent, ancestors, key, space), False

    def key(self, step: Step, ancestors: Mapping[str, Artifact]) -> str:
        """Return the content address of what `step` makes; a step that it names counts by its key."""
        parent = ancestors[step.parent]
        named = {setting: ancestors[name].key for setting, name in step.settings.references().items()}
        return hash_of(
            {
                "parent": parent.key,
                "stage": step.stage,
                "version": step.cls.version,
                "settings": step.settings.model_dump(mode="json") | named,
                "seed": self.seed,
                "data": {n: s.fingerprint for n, s in self.data.items() if n != "test"},
                "libraries": dict(self.versions),
                # an engine is made for the GPU that it was built on
                **({"gpus": gpu_names()} if "tensorrt" in step.cls.needs else {}),
            }
        )

    def _make(
        self, step: Step, parent: Artifact, ancestors: Mapping[str, Artifact], key: str, space: Path
    ) -> Artifact:
        out = space / "out"
        out.mkdir()
        ctx = Context(
            out=out,
            task=self.task,
            data={n: s for n, s in self.data.items() if n != "test"},
            seed=self.seed,
            ancestors=ancestors,
            score=self._validate,
            progress=self.display.progress,
            threads=self.threads,
            device=self.device,
        )
        started = time.monotonic()
        with _captured() as chatter:
            try:
                step.cls()(parent, step.settings, ctx)
            except SmeltError:
                raise
            except MemoryError as error:
                raise RunError(
                    f"{step.name}: the memory did not suffice. Try a smaller batch_size."
                ) from error
            except OSError as error:
                raise RunError(f"{step.name}: {error}") from error
        ctx.facts.setdefault("parameters", parent.manifest.facts.get("parameters"))
        if step.cls.produces == "torch":
            from smelt.runtime.checkpoint import count_parameters

            ctx.facts["parameters"] = count_parameters(out)
        for line in chatter.getvalue().splitlines():
            self.display.record(line)
        manifest = Manifest(
            key=key,
            format=step.cls.produces,
            task=self.task,
            stage=step.stage,
            settings=step.settings.model_dump(mode="json"),
            seed=self.seed,
            parent=parent.key,
            versions=dict(self.versions),
            facts=ctx.facts,
            warnings=ctx.warnings,
            seconds=round(time.monotonic() - started, 3),
        )
        return self.store.commit(out, manifest)

    def _validate(self, artifact: Artifact) -> Mapping[str, float]:
        scores = self.validation.score(artifact, self.data["validation"])["quality"]
        return {name: score["value"] for name, score in scores.items()}


@contextlib.contextmanager
def _captured() -> Iterator[io.StringIO]:
    """Keep what libraries print (exporters are talkative) off the terminal; the log gets it."""
    chatter = io.StringIO()
    with contextlib.redirect_stdout(chatter), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield chatter
