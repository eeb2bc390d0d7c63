"""Doing one step of a plan: take it from the store, or run the stage and put it there."""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from smelt.core.artifact import LATENTS, Artifact, Manifest
from smelt.core.data import Split
from smelt.core.errors import SmeltError, panics_explained
from smelt.core.files import hash_of, sha256_of
from smelt.core.stage import Context
from smelt.core.store.shelf import Shelf
from smelt.core.store.store import Store
from smelt.core.store.unfinished import Unfinished
from smelt.core.windows import Windows
from smelt.evaluate.environment import machine_id
from smelt.evaluate.metrics import LOWER_IS_BETTER
from smelt.execute.failures import explain
from smelt.execute.scoring import Scorer, library_versions
from smelt.look.machine import gpu_names, multiplies_bf16, trains_on
from smelt.runtime.foreign.tried import note_tried

if TYPE_CHECKING:
    from smelt.execute.display import Display
    from smelt.planning.plan import Step

_LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "sentencepiece",
    "accelerate",
    "onnx",
    "onnx-ir",
    "onnxscript",
    "onnxsim",
    "onnxruntime-gpu",
    "onnxruntime",
    "tensorrt",
    "tensorrt-rtx",
    "tensorrt-cu13",
    "tensorrt-cu12",
    "onnxruntime-ep-nv-tensorrt-rtx",
    "openvino",
)


@dataclass(frozen=True)
class Workshop:
    """What all steps of one run share.

    validation: scores on the validation data. windows: how the recipe has the text of a language model cut;
    the artifacts remember it, so that `smelt eval` scores as the run did.
    """

    store: Store
    task: Any
    data: Mapping[str, Split]
    seed: int
    threads: int | None
    validation: Scorer
    display: Display
    versions: Mapping[str, str] = field(default_factory=lambda: library_versions(_LIBRARIES))
    device: str = "auto"
    windows: Windows | None = None

    @property
    def remembered(self) -> dict[str, Any]:
        """What the manifests of the run's artifacts say of its windows; nothing for other tasks."""
        return {} if self.windows is None else {"windows": self.windows.model_dump(exclude_none=True)}

    def run_step(self, step: Step, ancestors: Mapping[str, Artifact], fresh: bool) -> tuple[Artifact, bool]:
        """Return the artifact of `step` and whether it was in the store already.

        Raises:
            SmeltError: the stage failed; nothing is left in the store.
        """
        key = self.key(step, ancestors)
        unfinished = Unfinished(self.store.root, key)

        def make(space: Path) -> Artifact:
            if fresh:
                unfinished.remove()
            manifest = self._make(step, ancestors, key, space, unfinished)
            made = self.store.commit(space / "out", manifest, replace=fresh)
            unfinished.remove()
            return made

        return self.obtain(step.name, key, fresh, make)

    def obtain(
        self, name: str, key: str, fresh: bool, make: Callable[[Path], Artifact]
    ) -> tuple[Artifact, bool]:
        """Take the artifact `key` from the store, or `make` it there, one process at a time."""
        mend = f"Run the recipe again with --rebuild {name} to build it again."
        found = None if fresh else self.store.find(key, mend)
        if found:
            return found, True

        def waiting(holder: str) -> None:
            self.display.line(f"{name}: waits for {holder}, which is making the same step")

        with self.store.lock(key, waiting):
            # whoever held the lock may just have made it
            found = None if fresh else self.store.find(key, mend)
            if found:
                return found, True
            with self.store.workspace() as space:
                try:
                    with panics_explained():
                        made = make(space)
                        if made.format == "onnx":
                            note_tried(made.manifest.files)
                        return made, False
                except Exception as error:
                    # said here, where what was written can still be looked at
                    failure = explain(error, name, space, self.display.log_path)
                    if failure is error:
                        raise
                    raise failure from error

    def key(self, step: Step, ancestors: Mapping[str, Artifact]) -> str:
        """Return the content address of what `step` makes; a step that it names counts by its key."""
        parent = ancestors[step.parent]
        named = {setting: ancestors[name].key for setting, name in step.settings.references().items()}
        return hash_of(
            {
                "parent": parent.key,
                "stage": step.stage,
                "version": step.cls.version,
                "settings": _settings(step) | named,
                "seed": self.seed,
                "data": {n: s.fingerprint for n, s in self.data.items() if n != "test"},
                "libraries": dict(self.versions),
                **self._machine(step),
                **self._judge(step),
                **_begins_with(step, parent),
            }
        )

    def _machine(self, step: Step) -> dict[str, Any]:
        """Return what of this machine decides what `step` makes: another one would make something else."""
        found: dict[str, Any] = {}
        if "tensorrt" in step.needs:
            found["gpus"] = gpu_names()  # an engine is made for the GPU that it was built on
        if step.needs & {"train", "unlabelled", "calibration"}:  # gradients are taken of either
            found["device"] = trains_on(self.device)
            if getattr(step.settings, "precision", None) == "auto":
                found["bf16"] = multiplies_bf16()
        if getattr(step.settings, "lora", None) is not None:
            found["adapters"] = library_versions(("peft",))
        elif packages := {*step.settings.packages()} - {*getattr(step.settings, "report_to", ())}:
            found["packages"] = library_versions(tuple(packages))
        if getattr(step.settings, "measures", False):
            from smelt.export.tune.threads import cores

            found["machine"] = machine_id()
            found["cores"] = cores()  # a process may be allowed fewer than there are
        return found

    def _judge(self, step: Step) -> dict[str, Any]:
        """What decides which checkpoint is kept, where a metric does: how it is generated and scored."""
        from smelt.compress.train.settings import LOSS

        chosen = getattr(step.settings, "metric_for_best_model", LOSS)
        return {} if chosen == LOSS else {"score": self.validation.conditions()}

    def _make(
        self, step: Step, ancestors: Mapping[str, Artifact], key: str, space: Path, unfinished: Unfinished
    ) -> Manifest:
        """Run the stage into `space / "out"`; return the manifest of what it made."""
        parent = ancestors[step.parent]
        out = space / "out"
        out.mkdir()
        shelf = Shelf(self.store, self.versions, self.display.line)
        ctx = Context(
            out=out,
            task=self.task,
            data={n: s for n, s in self.data.items() if n != "test"},
            seed=self.seed,
            ancestors=ancestors,
            score=self._validate,
            turned=LOWER_IS_BETTER,
            progress=self.display.progress,
            threads=self.threads,
            device=self.device,
            kept=shelf.value,
            files=shelf.files,
            unfinished=unfinished.next_training,
            logs=self.display.log_path.parent / "logs" / step.name,
            say=self.display.line,
        )
        started = time.monotonic()
        with _captured() as chatter:
            try:
                step.cls()(parent, step.settings, ctx)
            except SmeltError:
                unfinished.remove()  # it would end there again
                raise
            finally:
                for line in chatter.getvalue().splitlines():
                    self.display.record(line)
        ctx.details.update(self.remembered)
        ctx.details.setdefault("parameters", parent.manifest.details.get("parameters"))
        if step.cls.produces == "torch":
            from smelt.runtime.models.places.parameters import count_parameters

            ctx.details["parameters"] = count_parameters(out)
        return Manifest(
            key=key,
            format=step.cls.produces,
            task=self.task,
            stage=step.stage,
            settings=step.settings.model_dump(mode="json"),
            seed=self.seed,
            parent=parent.key,
            versions=dict(self.versions),
            details=ctx.details,
            warnings=ctx.warnings,
            seconds=round(time.monotonic() - started, 3),
        )

    def _validate(self, artifact: Artifact, rows: Split | None = None) -> Mapping[str, float]:
        scores = self.validation.score(artifact, rows or self.data["validation"])["quality"]
        # stages choose what scores highest, so where less is better the number is turned round
        return {n: -s["value"] if n in LOWER_IS_BETTER else s["value"] for n, s in scores.items()}


def _begins_with(step: Step, parent: Artifact) -> dict[str, Any]:
    """Return what a step that changes codes starts from besides: the float weights kept beside them."""
    kept = parent.manifest.files.get(LATENTS)
    goes_on = getattr(step.settings, "moves_codes", False) or hasattr(step.cls, "unfit_for_codes")
    return {"latents": kept.sha256} if goes_on and kept is not None else {}


def _settings(step: Step) -> dict[str, Any]:
    """Return a step's settings; a file or folder that they name counts by what it holds."""
    found: dict[str, Any] = step.settings.model_dump(mode="json")
    for (*above, last), name in step.settings.paths().items():
        path, part = Path(name), cast(Any, found)
        for word in above:
            part = part[word]
        files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
        part[last] = hash_of([[p.name, sha256_of(p)] for p in files])
    return found


@contextlib.contextmanager
def _captured() -> Iterator[io.StringIO]:
    """Keep what libraries print (exporters are talkative) off the terminal; the log gets it."""
    chatter = io.StringIO()
    with contextlib.redirect_stdout(chatter), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield chatter
