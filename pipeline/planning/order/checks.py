"""What can be known of a plan's steps before work starts: order, needs, references, gates."""

from __future__ import annotations

from pathlib import Path

from smelt.compress.behind_codes import BEHIND_QUANTIZE, IN_TRAINING
from smelt.core.artifact import Format
from smelt.core.data import CLASSIFICATION, IMAGES, SIMILARITY
from smelt.core.errors import nearest
from smelt.core.files import is_there, placed
from smelt.core.messages import Message, mistake
from smelt.core.stage import Settings, needs_of
from smelt.look.machine import unavailable_reason, unscored_reason
from smelt.look.model_folder import check_model_folder, read_config
from smelt.planning.order.advice import lost_work, poor_order
from smelt.planning.order.draft import Draft, finished, scheme_of
from smelt.planning.order.targets import check_listed, check_target
from smelt.planning.plan import Step
from smelt.recipe import stage_table
from smelt.recipe.errors import Mistakes, check, touches
from smelt.recipe.problem import AGREEMENT, has_classifier
from smelt.recipe.recipe import METRICS, Recipe
from smelt.recipe.stages import ROOT, StageEntry, step_names
from smelt.recipe.yaml_file import Where


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
        self.warnings: list[Message] = []
        self.notes: list[Message] = []
        self.drafts: dict[str, Draft] = {}
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
                self.mistakes.add(
                    where, f"'{name}' is already the name of the step in line {first}.", code="duplicate-step"
                )
                self.bad.add("stages")
                previous = None
                continue
            # after a step that could not be read nobody knows what this one goes on from
            before = entries[position - 1].index if position else -1
            previous = previous if entry.index == before + 1 else None
            draft = Draft(entry, name, self._parent(entry, previous))
            self.drafts[name] = draft
            self._load(draft)
            self._check(draft)
            previous = name
        lines = {name: self._above(draft) for name, draft in self.drafts.items()}
        self.warnings += lost_work(self.drafts, lines)
        return tuple(step for draft in self.drafts.values() if (step := finished(draft)))

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
            code = "later-step" if later else "unknown-step"
            self.mistakes.add(("stages", entry.index, "from"), f"{what}. {known}{hint}", code=code)
        return None

    def _load(self, draft: Draft) -> None:
        word = draft.entry.word
        from_graph = self._begins_as == "onnx"
        draft.cls = stage_table.load_stage(stage_table.ON_GRAPHS.get(word, word) if from_graph else word)
        settings_type: type[Settings] = draft.cls.settings_type
        if not draft.entry.settled:
            return
        draft.settings, wrong = check(settings_type, draft.entry.settings, draft.entry.path, self.mistakes)
        draft.wrong = frozenset(str(place[0]) for place in wrong if place)
        if draft.settings is not None:
            draft.settings = draft.settings.below(self.recipe.base)
            if "task" not in self.bad:
                draft.settings = draft.settings.for_task(self.recipe.task)
            for place, path in draft.settings.paths().items():
                in_list = isinstance(draft.entry.settings.get(str(place[0])), list)
                where = place if in_list else tuple(word for word in place if not isinstance(word, int))
                for problem in self._problems_of(Path(path), draft.settings.models().get(place)):
                    self.mistakes.note((*draft.entry.path, *where), problem)
                    draft.wrong |= {str(place[0])}

    def _problems_of(self, path: Path, as_it_is: bool | None) -> list[Message]:
        """Say what is wrong with what a step names; as_it_is: as `Settings.models` has it, None for files."""
        if not is_there(path):
            return [mistake("missing-file", f"{path}: no such file or folder.")]
        if as_it_is is None:
            return []
        if not path.is_dir():
            text = f"{path}: not a folder; expected a model's folder with config.json."
            return [mistake("not-a-folder", text)]
        task = None if "task" in self.bad else self.recipe.task
        problems, _ = check_model_folder(path, task, is_baseline=False, texts=task != IMAGES)
        if not problems and as_it_is and task in CLASSIFICATION:
            if has_classifier(read_config(path)[0]):
                return []
            return [mistake("no-classifier", f"{path}: its model has no classifier, so it cannot teach one.")]
        return problems

    def _check(self, draft: Draft) -> None:
        """Check order, task, data and machine for one step whose parents were checked."""
        assert draft.cls is not None
        word, path = draft.entry.word, draft.entry.path
        elsewhere = self._begins_as not in draft.cls.accepts and self._begins_as == "onnx"  # said below
        if "task" not in self.bad and self.recipe.task not in draft.cls.tasks and not elsewhere:
            tasks = ", ".join(sorted(draft.cls.tasks))
            self.mistakes.add(
                path,
                f"{word} does not work on {self.recipe.task}; it works on {tasks}.",
                code="unsupported-task",
            )
        given = self.recipe.data.splits()
        draft.needs = needs_of(draft.cls, draft.settings, given) if draft.settings else draft.cls.needs
        unsettled = draft.settings is None and hasattr(draft.cls, "needs_with")  # nobody knows what it needs
        for need in ("train", "unlabelled", "validation", "calibration") if not unsettled else ():
            unknown = touches(self.bad, f"data.{need}", "data.split")
            if need in draft.needs and need not in given and not unknown:
                instead = draft.settings and needs_of(draft.cls, draft.settings, [*given, "calibration"])
                either = need == "train" and instead and need not in instead  # one of them will do
                what, name = ("calibration or train", "calibration") if either else (need, need)
                self.mistakes.add(
                    path,
                    f"{word} needs {what} data; name a file with data: {{{name}: FILE}}.",
                    code="missing-data",
                )
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

    def _check_references(self, draft: Draft) -> None:
        """Settings that name a step must name an earlier one that gives a torch model."""
        earlier = [name for name in self.names if name != draft.name]
        torch = [name for name in earlier if self._format(name) in ("torch", None)]
        free = draft.settings.of_any_format() if draft.settings else ()
        folders = draft.settings.or_folders() if draft.settings else ()
        for setting, name in draft.references.items():
            fit = earlier if setting in free else torch
            path = (*draft.entry.path, *(int(w) if w.isdigit() else w for w in setting.split(".")))
            if name in fit or (name not in earlier and name not in self._given and self.may_be(name)):
                continue
            if name in earlier:
                code = "wrong-model-format"
                what = f"'{name}' gives {self._format(name)}, and a torch model is wanted."
            else:
                code = "later-step" if name in self._given else "unknown-step"
                what = f"no earlier step '{name[:60]}'."
            hint = nearest(name, fit)
            folder = placed(self.recipe.base, name)
            there = name.strip() and is_there(folder / "config.json") and any(folder.glob("*.safetensors"))
            if setting in folders and there:
                hint = f" A model in a folder is named as `{{model: {name}}}`."
            self.mistakes.add(path, f"{what} Those are: {', '.join(fit)}.{hint}", code=code)

    def _check_selection(self, draft: Draft) -> None:
        """A checkpoint can be chosen by its loss, or by a metric that the recipe scores."""
        metric = getattr(draft.settings, "metric_for_best_model", "loss")
        if metric == "loss" or touches(self.bad, "task", "score"):
            return
        path = (*draft.entry.path, "metric_for_best_model")
        if self.recipe.task == "language-modeling":
            self.mistakes.add(
                path,
                "a language model's metrics follow from its loss; write metric_for_best_model: loss.",
                code="metric-follows-loss",
            )
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
                code="metric-not-scored",
            )

    def _check_order(self, draft: Draft) -> None:
        assert draft.cls is not None
        word, path = draft.entry.word, draft.entry.path
        above = self._above(draft)
        parent = above[0] if above else None
        given: Format | None = parent.format if parent else self._begins_as
        if given is not None and given not in draft.cls.accepts:
            accepts = " or ".join(sorted(draft.cls.accepts))
            advice = self._advice(draft, given, above)
            reality = f"its parent step '{draft.parent}' gives {given}"
            self.mistakes.add(
                path, f"{word} works on {accepts} models, but {reality}; {advice}.", code="wrong-model-format"
            )
            return
        if getattr(draft.cls, "foreign", False) and self._begins_as != "onnx":
            self.mistakes.add(
                path,
                f"{word} is for ONNX models that a recipe starts from; what smelt exports is simplified on"
                " the way, quantized by `quantize` before it, narrowed by `onnx: {dtype: fp16}`.",
                code="needs-onnx-model",
            )
            return
        quantized = next((d for d in above if d.entry.word in ("quantize", "quantize-onnx")), None)
        for name, why in IN_TRAINING.items():
            if quantized and getattr(draft.settings, name, None) is not None:
                self.mistakes.add(
                    (*path, name),
                    f"the weights that would go are {scheme_of(quantized)} codes of '{quantized.name}';"
                    f" {why.replace('WORD', word)}",
                    code=BEHIND_QUANTIZE,
                )
        if quantized and getattr(draft.cls, "needs_float", False):
            self.mistakes.add(
                path,
                f"{word} cannot work after '{quantized.name}', which left {scheme_of(quantized)} codes;"
                f" move it before '{quantized.name}', or give `from: {quantized.parent or ROOT}`.",
                code="already-quantized",
            )
        self._check_units(draft, above)
        check_target(draft, parent, quantized, self._begins_as, self.mistakes)
        if draft.entry.word == "onnx" and any(d.entry.word == "shortlist" for d in above):
            check_listed(draft, quantized, self.mistakes)
        self.warnings += poor_order(draft, above)

    def _check_units(self, draft: Draft, above: list[Draft]) -> None:
        """Heads and neurons cannot be cut from what some steps leave."""
        cuts = (
            getattr(draft.cls, "cuts_units", False)
            or getattr(draft.settings, "learned_masks", None) is not None
        )
        for d in above if cuts else ():
            holds = getattr(d.cls, "holds_units", None)
            if holds and d.settings and (why := holds(d.settings)):
                self.mistakes.add(
                    draft.entry.path,
                    f"{draft.entry.word} cannot work after '{d.name}': {why}; move it before '{d.name}', or"
                    f" give `from: {d.parent or ROOT}`.",
                    code="impossible-order",
                )

    def _above(self, draft: Draft) -> list[Draft]:
        """Return the steps above `draft`, the nearest first."""
        found: list[Draft] = []
        name = draft.parent
        while name is not None and name in self.drafts:
            found.append(self.drafts[name])
            name = self.drafts[name].parent
        return found

    def _format(self, name: str) -> Format | None:
        return self._begins_as if name == ROOT else self.drafts[name].format

    def _advice(self, draft: Draft, given: Format, above: list[Draft]) -> str:
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
