"""What can be known of a plan's steps before work starts: order, needs, references, gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smelt import stage_table
from smelt.core.artifact import Format
from smelt.core.errors import nearest
from smelt.core.stage import Settings, Stage
from smelt.machine import unavailable_reason, unscored_reason
from smelt.plan import PlannedGate, Step
from smelt.recipe import Recipe
from smelt.recipe_errors import Mistakes, check
from smelt.recipe_stages import ROOT, StageEntry, step_names
from smelt.recipe_yaml import Where

# These change float weights, which a quantized model no longer has; training goes through its codes.
_NEED_FLOAT = frozenset({"prune", "factorize", "quantize"})


@dataclass
class _Draft:
    """A step as far as it is known; `cls` and `settings` are None where they are wrong."""

    entry: StageEntry
    name: str
    parent: str | None
    cls: type[Stage[Any]] | None = None
    settings: Settings | None = None
    unavailable: str | None = None
    unscored: str | None = None

    @property
    def format(self) -> Format | None:
        return self.cls.produces if self.cls else None


class Checker:
    """Checks one recipe; mistakes go to `mistakes`, advice to `warnings`.

    bad: the top-level keys that are wrong already, and of which nothing more is said.
    """

    def __init__(self, recipe: Recipe, mistakes: Mistakes, bad: set[str]) -> None:
        self.recipe, self.mistakes, self.bad = recipe, mistakes, bad
        self.warnings: list[str] = []
        self.drafts: dict[str, _Draft] = {}

    @property
    def names(self) -> list[str]:
        """The names of all steps, `model` first."""
        return [ROOT, *self.drafts]

    @property
    def places(self) -> dict[str, Where]:
        """Where in the recipe the settings of each step stand."""
        return {name: draft.entry.path for name, draft in self.drafts.items()}

    def steps(self) -> tuple[Step, ...]:
        """Build the tree and check every step; only whole steps are returned."""
        entries = list(self.recipe.stages)
        names = step_names(entries)
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
            draft = _Draft(entry, name, self._parent(entry, previous, names))
            self.drafts[name] = draft
            self._load(draft)
            self._check(draft)
            previous = name
        return tuple(step for draft in self.drafts.values() if (step := _finish(draft)))

    def _parent(self, entry: StageEntry, previous: str | None, names: list[str]) -> str | None:
        if entry.parent is None:
            return previous
        if entry.parent in self.names:
            return entry.parent
        later = entry.parent in names
        if later or "stages" not in self.bad:
            word = entry.parent[:60]
            what = f"'{word}' is not an earlier step" if later else f"no step '{word}'"
            hint = "" if later else nearest(word, self.names)
            known = f"Earlier steps: {', '.join(self.names)}."
            self.mistakes.add(("stages", entry.index, "from"), f"{what}. {known}{hint}")
        return None

    def _load(self, draft: _Draft) -> None:
        draft.cls = stage_table.load_stage(draft.entry.word)
        settings_type: type[Settings] = draft.cls.settings_type
        draft.settings, _ = check(settings_type, draft.entry.settings, draft.entry.path, self.mistakes)

    def _check(self, draft: _Draft) -> None:
        """Check order, task, data and machine for one step whose parents were checked."""
        assert draft.cls is not None
        word, path = draft.entry.word, draft.entry.path
        if "task" not in self.bad and self.recipe.task not in draft.cls.tasks:
            tasks = ", ".join(sorted(draft.cls.tasks))
            self.mistakes.add(path, f"{word} does not work on {self.recipe.task}; it works on {tasks}.")
        given = self.recipe.data.splits()
        for need in ("train", "validation", "calibration"):
            if need in draft.cls.needs and need not in given and "data" not in self.bad:
                self.mistakes.add(path, f"{word} needs {need} data; name a file with data: {{{need}: FILE}}.")
        draft.unavailable = unavailable_reason(draft.cls)
        draft.unscored = unscored_reason(draft.cls.produces)
        if draft.parent is None:
            return
        parent = self.drafts.get(draft.parent)
        if parent and parent.unavailable and not draft.unavailable:
            draft.unavailable = f"it goes on from '{parent.name}', which cannot run here."
        self._check_order(draft)
        self._check_references(draft)

    def _check_references(self, draft: _Draft) -> None:
        """Settings that name a step must name an earlier one that gives a torch model."""
        earlier = [name for name in self.names if name != draft.name]
        fit = [name for name in earlier if self._format(name) in ("torch", None)]
        for setting, name in (draft.settings.references() if draft.settings else {}).items():
            path = (*draft.entry.path, setting)
            if name in fit:
                continue
            if name in earlier:
                what = f"'{name}' gives {self._format(name)}, and a torch model is wanted."
            else:
                what = f"no earlier step '{name[:60]}'."
            self.mistakes.add(path, f"{what} Those are: {', '.join(fit)}.{nearest(name, fit)}")

    def _check_order(self, draft: _Draft) -> None:
        assert draft.cls is not None
        word, path = draft.entry.word, draft.entry.path
        above = self._above(draft)
        parent = above[0] if above else None
        given: Format | None = parent.format if parent else "torch"
        if given is not None and given not in draft.cls.accepts:
            accepts = " or ".join(sorted(draft.cls.accepts))
            advice = self._advice(draft, given, above)
            reality = f"its parent step '{draft.parent}' gives {given}"
            self.mistakes.add(path, f"{word} works on {accepts} models, but {reality}; {advice}.")
            return
        quantized = next((d for d in above if d.entry.word == "quantize"), None)
        if quantized and word in _NEED_FLOAT:
            self.mistakes.add(
                path,
                f"{word} cannot work after '{quantized.name}', which left {_scheme(quantized)} codes;"
                f" move it before '{quantized.name}', or give `from: {quantized.parent or ROOT}`.",
            )
        self._check_target(draft, parent, quantized)
        self._advise(draft, above)

    def _check_target(self, draft: _Draft, parent: _Draft | None, quantized: _Draft | None) -> None:
        """TensorRT reads only graphs that were made for it, and none but ort-cpu runs quantized layers."""
        target = getattr(draft.settings, "target", None)
        if draft.entry.word == "onnx" and target in ("tensorrt", "ort-cuda") and quantized:
            runtime = "TensorRT" if target == "tensorrt" else "ONNX Runtime on CUDA"
            scheme = _scheme(quantized)
            codes = "dynamic int8" if scheme == "int8-dynamic" else f"{scheme} codes (MatMulNBits)"
            self.mistakes.add(
                (*draft.entry.path, "target"),
                f"{runtime} cannot run the {codes} of '{quantized.name}';"
                f" give `from: {quantized.parent or ROOT}`.",
            )
        made_for = getattr(parent.settings, "target", None) if parent else None
        if draft.entry.word == "tensorrt" and made_for not in (None, "tensorrt"):
            assert parent is not None
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
        for d in above if draft.entry.word == "onnx" else ():
            if d.entry.word in ("distill", "finetune"):
                break
            if d.entry.word == "quantize" and _scheme(d) == "binary":
                self.warnings.append(
                    f"{where}: the binary weights of '{d.name}' were not trained and say little;"
                    f" put a distill after '{d.name}', which trains through the codes."
                )
        if draft.entry.word == "distill" and draft.entry.settings.get("student"):
            late = " and ".join(sorted(set(words) & {"prune", "factorize"}))
            if late:
                self.warnings.append(
                    f"{where}: choosing a student's layers after {late} throws part of that work away;"
                    " distil to fewer layers first."
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
        return "torch" if name == ROOT else self.drafts[name].format

    def _advice(self, draft: _Draft, given: Format, above: list[_Draft]) -> str:
        """Say how `draft` comes to a parent whose format it accepts."""
        assert draft.cls is not None
        accepts = draft.cls.accepts
        ways = []
        turned = [d for d in above if d.format == given]
        if turned and turned[-1].parent is not None and self._format(turned[-1].parent) in accepts:
            ways.append(f"move it before '{turned[-1].name}'")
        possible = [name for name in self.names if name != draft.name and self._format(name) in accepts]
        if possible:
            ways.append(f"give `from:` with one of: {', '.join(possible)}")
        makers = [word for word in stage_table.TABLE if stage_table.load_stage(word).produces in accepts]
        return ", or ".join(ways) or f"put one of these before it: {', '.join(makers)}"

    def cut(self, until: str | None) -> list[str]:
        """Return the names of the steps that `until` needs and itself (all for None), in order."""
        if until is None or until == ROOT:
            return [] if until else list(self.drafts)
        if until not in self.drafts:
            if "stages" not in self.bad:
                self.mistakes.say(f"--until: {self._no_step(until)}")
            return list(self.drafts)
        wanted = {until}
        for name, draft in reversed(self.drafts.items()):  # what a step stands on comes before it
            if name in wanted:
                wanted |= {
                    draft.parent or ROOT,
                    *(draft.settings.references().values() if draft.settings else ()),
                }
        return [name for name in self.drafts if name in wanted]

    def gates(self, kept: list[str]) -> tuple[PlannedGate, ...]:
        """Give every gate its steps: those of `at`, else the last of each branch that is scored here."""
        if self.bad & {"gates", "score", "task", "stages"}:
            return ()
        out: list[PlannedGate] = []
        for metric, gate in self.recipe.gates.items():
            at = (gate.at,) if isinstance(gate.at, str) else gate.at
            for name in at or ():
                if name not in self.names:
                    self.mistakes.add(("gates", metric, "at"), self._no_step(name))
            steps = tuple(n for n in at if n in (ROOT, *kept)) if at else self._leaves(kept)
            limits = {"max_drop": gate.max_drop, "min": gate.min, "max": gate.max}
            given = [(kind, limit) for kind, limit in limits.items() if limit is not None and steps]
            out += [PlannedGate(metric, kind, limit, steps, gate.confidence) for kind, limit in given]
        return tuple(out)

    def _leaves(self, kept: list[str]) -> tuple[str, ...]:
        drafts = [self.drafts[name] for name in kept]
        running = [d for d in drafts if not d.unavailable and not d.unscored]
        parents = {d.parent for d in running}
        return tuple(d.name for d in running if d.name not in parents) or (ROOT,)

    def baseline(self, kept: list[str]) -> None:
        """Check that the baseline is a step, and one that will be there and scored."""
        name = self.recipe.baseline
        if self.bad & {"baseline", "stages"} or name == ROOT:
            return
        if name in kept:
            if reason := self.drafts[name].unscored:
                self.warnings.append(f"nothing is compared with the baseline '{name}': {reason}")
            return
        if name in self.names:
            self.warnings.append(f"the baseline '{name}' is left out, so nothing is compared with it.")
        else:
            self.mistakes.add(("baseline",), self._no_step(name))

    def _no_step(self, name: str) -> str:
        return f"no step '{name[:60]}'. Known: {', '.join(self.names)}.{nearest(name, self.names)}"


def _scheme(draft: _Draft) -> str:
    """Return the scheme of a quantize step; the default where its settings are wrong."""
    return str(getattr(draft.settings, "scheme", "int8-dynamic"))


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
    )
