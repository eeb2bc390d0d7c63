"""What can be known of a plan's steps before work starts: order, needs, references, gates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.core.artifact import Format
from smelt.core.data import SIMILARITY
from smelt.core.errors import nearest
from smelt.core.stage import Need, Settings, Stage, needs_of
from smelt.look.machine import unavailable_reason, unscored_reason
from smelt.plan.plan import Step
from smelt.recipe import stage_table
from smelt.recipe.errors import Mistakes, check, touches
from smelt.recipe.problem import AGREEMENT
from smelt.recipe.recipe import METRICS, Recipe
from smelt.recipe.stages import ROOT, StageEntry, step_names
from smelt.recipe.yaml_file import Where
from smelt.runtime.schemes.registry import DEFAULT, OBSERVING, SCHEMES
from smelt.runtime.schemes.scheme import TARGETS, graphs_for

_RUNTIMES = {
    "ort-cpu": "ONNX Runtime",
    "ort-cuda": "ONNX Runtime on CUDA",
    "tensorrt": "TensorRT",
    "openvino": "OpenVINO",
    "ort-tensorrt": "TensorRT in ONNX Runtime",
    "ort-tensorrt-rtx": "TensorRT for RTX in ONNX Runtime",
}


@dataclass
class _Draft:
    """A step as far as it is known.

    settings: None where they are no settings at all; wrong ones have their defaults there, and stand in
    `wrong`, so that nothing is concluded from them.
    """

    entry: StageEntry
    name: str
    parent: str | None
    cls: type[Stage[Any]] | None = None
    settings: Settings | None = None
    wrong: frozenset[str] = frozenset()
    unavailable: str | None = None
    unscored: str | None = None
    needs: frozenset[Need] = frozenset()

    @property
    def format(self) -> Format | None:
        """What the step gives, where it is known."""
        return self.cls.produces if self.cls else None

    @property
    def references(self) -> dict[str, str]:
        """The steps that its settings name, by setting."""
        found = self.settings.references() if self.settings else {}
        return {setting: name for setting, name in found.items() if setting.split(".")[0] not in self.wrong}

    @property
    def target(self) -> str | None:
        """The runtime that it is for; None where it is for none, or that is not known."""
        return None if "target" in self.wrong else getattr(self.settings, "target", None)


class Checker:
    """Checks one recipe; mistakes go to `mistakes`, advice to `warnings` and `notes`.

    bad: what is wrong already, as dotted paths, and of which nothing more is said. begins_as: the format of
    the untouched model.
    """

    def __init__(
        self, recipe: Recipe, mistakes: Mistakes, bad: set[str], begins_as: Format = "torch"
    ) -> None:
        self.recipe, self.mistakes, self.bad = recipe, mistakes, bad
        self._begins_as: Format = begins_as
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.drafts: dict[str, _Draft] = {}
        self._given = step_names(list(recipe.stages))
        self._unread = _unread_names(recipe) if "stages" in bad else set()

    @property
    def names(self) -> list[str]:
        """The names of all steps, `model` first."""
        return [ROOT, *self.drafts]

    def may_be(self, name: str) -> bool:
        """Say whether there is a step `name`, or may be one among those that could not be read."""
        return name in self.names or not self._unread.isdisjoint({"*", name, name.rpartition("-")[0]})

    def no_step(self, name: str) -> str:
        """Return the sentence that says that there is no step `name`."""
        return f"no step '{name[:60]}'. Known: {', '.join(self.names)}.{nearest(name, self.names)}"

    @property
    def places(self) -> dict[str, Where]:
        """Where in the recipe the settings of each step stand."""
        return {name: draft.entry.path for name, draft in self.drafts.items()}

    def steps(self) -> tuple[Step, ...]:
        """Build the tree and check every step; only whole steps are returned."""
        entries, names = list(self.recipe.stages), self._given
        previous: str | None = ROOT
        for position, (entry, name) in enumerate(zip(entries, names, strict=True)):
            if name in self.drafts:
                first = self.drafts[name].entry.line
                where = ("stages", entry.index, "name")
                self.mistakes.add(where, f"'{name}' is already the name of the step in line {first}.")
                self.bad.add("stages")
                previous = None
                continue
            # after a step that could not be read nobody knows what this one goes on from
            before = entries[position - 1].index if position else -1
            previous = previous if entry.index == before + 1 else None
            draft = _Draft(entry, name, self._parent(entry, previous))
            self.drafts[name] = draft
            self._load(draft)
            self._check(draft)
            previous = name
        return tuple(step for draft in self.drafts.values() if (step := _finish(draft)))

    def _parent(self, entry: StageEntry, previous: str | None) -> str | None:
        if entry.parent is None:
            return previous
        if entry.parent in self.names:
            return entry.parent
        later = entry.parent in self._given
        if later or not self.may_be(entry.parent):
            word = entry.parent[:60]
            what = f"'{word}' is not an earlier step" if later else f"no step '{word}'"
            hint = "" if later else nearest(word, self.names)
            known = f"Earlier steps: {', '.join(self.names)}."
            self.mistakes.add(("stages", entry.index, "from"), f"{what}. {known}{hint}")
        return None

    def _load(self, draft: _Draft) -> None:
        word = draft.entry.word
        from_graph = self._begins_as == "onnx"
        draft.cls = stage_table.load_stage(stage_table.ON_GRAPHS.get(word, word) if from_graph else word)
        settings_type: type[Settings] = draft.cls.settings_type
        draft.settings, wrong = check(settings_type, draft.entry.settings, draft.entry.path, self.mistakes)
        draft.wrong = frozenset(str(place[0]) for place in wrong if place)
        if draft.settings is not None:
            draft.settings = draft.settings.below(self.recipe.base)
            for place, path in draft.settings.paths().items():
                if not Path(path).exists():
                    self.mistakes.add((*draft.entry.path, *place), f"{path}: no such file or folder.")
                    draft.wrong |= {place[0]}

    def _check(self, draft: _Draft) -> None:
        """Check order, task, data and machine for one step whose parents were checked."""
        assert draft.cls is not None
        word, path = draft.entry.word, draft.entry.path
        elsewhere = self._begins_as not in draft.cls.accepts and self._begins_as == "onnx"  # said below
        if "task" not in self.bad and self.recipe.task not in draft.cls.tasks and not elsewhere:
            tasks = ", ".join(sorted(draft.cls.tasks))
            self.mistakes.add(path, f"{word} does not work on {self.recipe.task}; it works on {tasks}.")
        given = self.recipe.data.splits()
        draft.needs = needs_of(draft.cls, draft.settings, given) if draft.settings else draft.cls.needs
        unsettled = draft.settings is None and hasattr(draft.cls, "needs_with")  # nobody knows what it needs
        for need in ("train", "validation", "calibration") if not unsettled else ():
            unknown = touches(self.bad, f"data.{need}", "data.split")
            if need in draft.needs and need not in given and not unknown:
                instead = draft.settings and needs_of(draft.cls, draft.settings, [*given, "calibration"])
                either = need == "train" and instead and need not in instead  # one of them will do
                what, name = ("calibration or train", "calibration") if either else (need, need)
                self.mistakes.add(path, f"{word} needs {what} data; name a file with data: {{{name}: FILE}}.")
        self._check_references(draft)
        self._check_selection(draft)
        draft.unavailable = unavailable_reason(draft.cls, draft.target, draft.settings)
        draft.unscored = unscored_reason(
            draft.cls.produces, draft.target, getattr(draft.settings, "dtype", None)
        )
        if draft.parent is None:
            return
        parent = self.drafts.get(draft.parent)
        if parent and parent.unavailable and not draft.unavailable:
            draft.unavailable = f"it goes on from '{parent.name}', which cannot run here."
        self._check_order(draft)

    def _check_references(self, draft: _Draft) -> None:
        """Settings that name a step must name an earlier one that gives a torch model."""
        earlier = [name for name in self.names if name != draft.name]
        torch = [name for name in earlier if self._format(name) in ("torch", None)]
        free = draft.settings.of_any_format() if draft.settings else ()
        for setting, name in draft.references.items():
            fit = earlier if setting in free else torch
            path = (*draft.entry.path, *setting.split("."))
            if name in fit or (name not in earlier and name not in self._given and self.may_be(name)):
                continue
            if name in earlier:
                what = f"'{name}' gives {self._format(name)}, and a torch model is wanted."
            else:
                what = f"no earlier step '{name[:60]}'."
            self.mistakes.add(path, f"{what} Those are: {', '.join(fit)}.{nearest(name, fit)}")

    def _check_selection(self, draft: _Draft) -> None:
        """A checkpoint can be chosen by its loss, or by a metric that the recipe scores."""
        metric = getattr(draft.settings, "select", "loss")
        if metric == "loss" or touches(self.bad, "task", "score"):
            return
        path = (*draft.entry.path, "select")
        if self.recipe.task == "language-modeling":
            self.mistakes.add(path, "a language model's metrics follow from its loss; write select: loss.")
            return
        # a classifier's own metrics, where none are named, are known when its labels were read
        known = ("loss", *(self.recipe.score.quality or METRICS[self.recipe.task]))
        if self.recipe.task == SIMILARITY:  # on validation rows there is no baseline to agree with
            known = tuple(name for name in known if name != AGREEMENT)
        if metric not in known:
            self.mistakes.add(
                path,
                f"'{metric[:60]}' is not scored; known: {', '.join(known)}.{nearest(metric, known)}"
                " Other metrics can be named in score: {quality: [...]}.",
            )

    def _check_order(self, draft: _Draft) -> None:
        assert draft.cls is not None
        word, path = draft.entry.word, draft.entry.path
        above = self._above(draft)
        parent = above[0] if above else None
        given: Format | None = parent.format if parent else self._begins_as
        if given is not None and given not in draft.cls.accepts:
            accepts = " or ".join(sorted(draft.cls.accepts))
            advice = self._advice(draft, given, above)
            reality = f"its parent step '{draft.parent}' gives {given}"
            self.mistakes.add(path, f"{word} works on {accepts} models, but {reality}; {advice}.")
            return
        if getattr(draft.cls, "foreign", False) and self._begins_as != "onnx":
            self.mistakes.add(
                path,
                f"{word} is for ONNX models that a recipe starts from; what smelt exports is simplified on"
                " the way, quantized by `quantize` before it, narrowed by `onnx: {dtype: fp16}`.",
            )
            return
        quantized = next((d for d in above if d.entry.word in ("quantize", "quantize-graph")), None)
        if quantized and getattr(draft.settings, "lora", None) is not None:
            self.mistakes.add(
                (*path, "lora"),
                f"adapters beside the {_scheme(quantized)} codes of '{quantized.name}' would be lost in them;"
                f" move {word} before '{quantized.name}', or leave lora out, which trains through the codes.",
            )
        if quantized and getattr(draft.cls, "needs_float", False):
            self.mistakes.add(
                path,
                f"{word} cannot work after '{quantized.name}', which left {_scheme(quantized)} codes;"
                f" move it before '{quantized.name}', or give `from: {quantized.parent or ROOT}`.",
            )
        self._check_target(draft, parent, quantized)
        self._advise(draft, above)

    def _check_target(self, draft: _Draft, parent: _Draft | None, quantized: _Draft | None) -> None:
        """TensorRT reads only graphs that were made for it, and not every target runs every scheme."""
        target = draft.target
        if draft.entry.word == "onnx" and target is not None and quantized:
            runtime = _RUNTIMES.get(target, target)
            codes = _refused(quantized, target)
            if codes:
                fit = " or ".join(name for name in TARGETS if _refused(quantized, name) is None)
                self.mistakes.add(
                    (*draft.entry.path, "target"),
                    f"{runtime} cannot run the {codes} of '{quantized.name}'; give"
                    f" `from: {quantized.parent or ROOT}`{f', or target: {fit}' if fit else ''}.",
                )
        made_for = parent.target if parent else None
        if draft.entry.word == "tensorrt" and made_for not in (None, "tensorrt"):
            assert parent is not None
            if self._begins_as == "onnx":
                self.mistakes.add(
                    draft.entry.path,
                    f"tensorrt reads symmetric int8, and '{parent.name}' is for {made_for}; give"
                    f" `{parent.entry.word}: {{scheme: {OBSERVING}, target: tensorrt}}`.",
                )
                return
            self.mistakes.add(
                draft.entry.path,
                f"tensorrt reads graphs with target tensorrt, but '{parent.name}' has target {made_for};"
                " add `- onnx: {target: tensorrt}` before it, or give `from:` such a step.",
            )

    def _advise(self, draft: _Draft, above: list[_Draft]) -> None:
        """Warn about orders that run but are known to be poor."""
        words = [d.entry.word for d in above]
        where = f"line {draft.entry.line}: {draft.name}"
        if draft.entry.word == "prune" and "factorize" in words:
            self.warnings.append(f"{where}: pruning after factorize finds few whole matrices; prune first.")
        if draft.entry.word == "factorize" and "sparsify" in words:
            self.warnings.append(f"{where}: two thin matrices are dense; the zeros of sparsify are lost.")
        for d in above if draft.entry.word == "onnx" else ():
            if d.entry.word in ("distill", "finetune"):
                break
            scheme = SCHEMES.get(_scheme(d)) if d.entry.word == "quantize" else None
            if scheme is not None and scheme.trained:
                self.warnings.append(
                    f"{where}: the {scheme.name} weights of '{d.name}' were not trained and say little;"
                    f" put a distill after '{d.name}', which trains through the codes."
                )
        student = draft.entry.word == "distill" and draft.entry.settings.get("student")
        late = " and ".join(sorted(set(words) & {"prune", "factorize"}))
        if late and student:
            self.warnings.append(
                f"{where}: choosing a student's layers after {late} throws part of that work away;"
                " distil to fewer layers first."
            )
        if late and draft.entry.word == "depth":
            self.warnings.append(
                f"{where}: layers that go after {late} take part of that work with them; put depth first."
            )

    def _above(self, draft: _Draft) -> list[_Draft]:
        """Return the steps above `draft`, the nearest first."""
        found: list[_Draft] = []
        name = draft.parent
        while name is not None and name in self.drafts:
            found.append(self.drafts[name])
            name = self.drafts[name].parent
        return found

    def _format(self, name: str) -> Format | None:
        return self._begins_as if name == ROOT else self.drafts[name].format

    def _advice(self, draft: _Draft, given: Format, above: list[_Draft]) -> str:
        """Say how `draft` comes to a parent whose format it accepts."""
        assert draft.cls is not None
        accepts = draft.cls.accepts
        if self._begins_as == "onnx" and given == "onnx":
            fitting = [w for w in stage_table.TABLE if "onnx" in stage_table.load_stage(w).accepts]
            return (
                f"what can follow an ONNX model: {', '.join(fitting)}. For {draft.entry.word} start from the"
                " folder with weights that it was exported from"
            )
        ways = []
        turned = [d for d in above if d.format == given]
        if turned and turned[-1].parent is not None and self._format(turned[-1].parent) in accepts:
            ways.append(f"move it before '{turned[-1].name}'")
        possible = [name for name in self.names if name != draft.name and self._format(name) in accepts]
        if possible:
            ways.append(f"give `from:` with one of: {', '.join(possible)}")
        makers = [word for word in stage_table.TABLE if stage_table.load_stage(word).produces in accepts]
        return ", or ".join(ways) or f"put one of these before it: {', '.join(makers)}"


def _unread_names(recipe: Recipe) -> set[str]:
    """Return the names that the steps may have which could not be read; `*` for any."""
    items = recipe.document.get("stages")
    read = {entry.index for entry in recipe.stages}
    found: set[str] = set()
    for number, item in enumerate(items if isinstance(items, list) else ["*"]):
        name = item.get("name") if isinstance(item, dict) else None
        if number not in read:
            # a mistyped stage is called by its word, and nobody knows which one was meant
            found |= {name} if isinstance(name, str) else set(stage_table.TABLE)
    return found if isinstance(items, list) else {"*"}


def _scheme(draft: _Draft) -> str:
    """Return the scheme of a quantize step, or `quantized` where that is not known."""
    return "quantized" if "scheme" in draft.wrong else str(getattr(draft.settings, "scheme", DEFAULT))


def _refused(quantized: _Draft, target: str) -> str | None:
    """Return what of a quantize step no graph for `target` can hold; None where it can hold all."""
    target = graphs_for(target)
    if quantized.wrong & {"scheme", "vocabulary"}:
        all_refuse = all(target in scheme.refused for scheme in SCHEMES.values())
        return "quantized layers" if all_refuse else None
    settings: Any = quantized.settings
    schemes = [SCHEMES[name] for name in (settings.schemes() if settings else [DEFAULT])]
    return next((scheme.leaves_as for scheme in schemes if target in scheme.refused), None)


def _finish(draft: _Draft) -> Step | None:
    if draft.cls is None or draft.settings is None or draft.parent is None:
        return None
    entry = draft.entry
    return Step(
        draft.name,
        entry.word,
        draft.cls,
        draft.settings,
        draft.parent,
        entry.optional,
        entry.line,
        draft.unavailable,
        draft.unscored,
        draft.wrong,
        draft.needs,
    )
