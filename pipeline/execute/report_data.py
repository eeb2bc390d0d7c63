"""Building report.json while a run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import Artifact
from smelt.core.data import Split
from smelt.core.errors import SmeltError
from smelt.core.files import load_json
from smelt.core.messages import Message, as_json, warning
from smelt.execute.gate_verdicts import Evidence, judge

if TYPE_CHECKING:
    from smelt.planning.plan import Plan, Step

_EMPTY: dict[str, Any] = {
    "reason": None,
    "error": None,
    "format": None,
    "target": None,
    "runner": None,
    "device": None,
    "artifact": None,
    "deployable": None,
    "key": None,
    "parameters": None,
    "size_bytes": None,
    "float_dtype": None,
    "seconds": None,
    "peak_memory_bytes": None,
}


class ReportBuilder:
    """The report of one run; `current()` is valid at any moment."""

    def __init__(self, plan: Plan, data: Mapping[str, Split], limit: int | None) -> None:
        from smelt.evaluate.environment import environment

        self.plan = plan
        self.status = "passed"
        self.finished = False
        self.statistics: dict[str, dict[str, Any]] = {}
        self.on_test: dict[str, dict[str, Any]] = {}
        rows = {name: len(split) for name, split in data.items()}
        self.data: dict[str, Any] = {
            "schema": 3,
            "recipe": {"name": plan.path.stem, **plan.recipe_dict(), "rows": rows, "limit": limit},
            "environment": environment(),
            "status": self.status,
            "baseline": None,
            "judged_on": plan.judged_on,
            "warnings": as_json(plan.warnings),
            "steps": [_blank("model", "model", None, {})]
            + [_blank(s.name, s.stage, s.parent, s.settings.meant()) for s in plan.steps],
            "frontier": [],
        }
        self._steps = {step["name"]: step for step in self.data["steps"]}
        self._find_baseline()

    def _find_baseline(self) -> None:
        """Name the baseline once it is there: `--until` may leave it out."""
        if self.plan.recipe.baseline in self._steps:
            self.data["baseline"] = self.plan.recipe.baseline

    def warn(self, warning: Message) -> bool:
        """Add a warning about the whole run; return whether it is new."""
        (found,) = as_json([warning])
        new = found not in self.data["warnings"]
        self.data["warnings"] += [found] if new else []
        return new

    def done(self, name: str, artifact: Artifact, score: Mapping[str, Any], cached: bool) -> None:
        """Fill in a finished step."""
        step = self._steps[name]
        step.update(
            _of_artifact(name, artifact, cached),
            runner=score["runner"].split()[0],
            device=score.get("device"),
            warnings=[*as_json(artifact.manifest.warnings), *score["warnings"]],
            quality=dict(score["quality"]),
        )
        self.statistics[name] = score["statistics"]
        step["against_parent"] = _compare(self.statistics, name, step["parent"])
        step["against_baseline"] = _compare(self.statistics, name, self.data["baseline"])
        if name == self.data["baseline"]:  # steps that were scored before it can be compared only now
            for other in self.statistics:
                self._steps[other]["against_baseline"] = _compare(self.statistics, other, name)

    def tested(self, name: str, score: Mapping[str, Any]) -> None:
        """Fill in what a step that was chosen on validation scores on test; the baseline comes first."""
        self.on_test[name] = score["statistics"]
        against = _compare(self.on_test, name, self.data["baseline"])
        self._steps[name]["test"] = {
            "quality": dict(score["quality"]),
            "against_baseline": against,
            "gates": [],
        }
        self._steps[name]["warnings"] += [
            found | {"message": f"on test: {found['message']}"} for found in score["warnings"]
        ]

    def untested(self, name: str, failure: SmeltError) -> None:
        """Record that a step could not be scored on test."""
        self._set_status("error")
        self._steps[name]["error"] = as_json([failure.as_message().prefixed("on test: ")])[0]

    def judge_test(self) -> None:
        """Lay the gates on what the steps score on test, for their reader: validation decided."""
        base = self.on_test.get(self.data["baseline"], {})
        for name, own in self.on_test.items():
            step = self._steps[name]
            gates = [gate for gate in self.plan.gates_of(name) if gate.metric in own]
            verdicts = [judge(gate, step | step["test"], Evidence(own, base)) for gate in gates]
            step["test"]["gates"] = verdicts

    def rescored(self, name: str, artifact: Artifact, score: Mapping[str, Any]) -> None:
        """Fill in a finished step anew, whose score could be completed only now."""
        self.done(name, artifact, score, self._steps[name]["status"] == "cached")

    def earlier(
        self, step: Step, artifact: Artifact, score: Mapping[str, Any] | None, reason: str | None
    ) -> None:
        """Add a step that this run leaves out and an earlier one did, with what the store knows of it.

        reason: why it cannot be scored on this machine, or None.
        """
        entry = _blank(step.name, step.stage, step.parent, step.settings.meant())
        self._steps[step.name] = entry
        self._find_baseline()
        if score is None:
            self.unscored(step.name, artifact, reason or "the run that made it did not score it so", True)
        else:
            self.done(step.name, artifact, score, True)
        entry["from_previous_run"] = True
        order = ["model", *(name for name in self.plan.order if name in self._steps)]
        self.data["steps"] = [self._steps[name] for name in order]

    def unscored(self, name: str, artifact: Artifact, reason: str, cached: bool) -> None:
        """Fill in a finished step that cannot be run, and so not be scored, on this machine."""
        self._steps[name].update(_of_artifact(name, artifact, cached), reason=reason)

    def skipped(self, name: str, reason: str) -> None:
        """Record an optional step that could not run here."""
        self._steps[name].update(status="skipped", reason=reason)

    def not_reached(self, name: str, reason: str) -> None:
        """Record a step whose parent is missing."""
        skipped = self._steps[self._steps[name]["parent"]]["status"] == "skipped"
        self._steps[name].update(status="skipped" if skipped else "not-reached", reason=reason)

    def failed(self, failure: SmeltError, name: str | None = None) -> None:
        """Record an error, on the step it belongs to or else on the first one not reached."""
        self._set_status("error")
        unreached = next((s["name"] for s in self.data["steps"] if s["status"] == "not-reached"), None)
        name = name or unreached or self.data["steps"][-1]["name"]
        self._steps[name].update(status="error", error=as_json([failure.as_message()])[0])

    def interrupted(self) -> None:
        """Record that the user stopped the run."""
        self._set_status("interrupted")

    def add_latency(self, measured: Mapping[str, Mapping[str, Any]]) -> None:
        """Fill in what `LatencyScores.measure` gave."""
        for name, value in measured.items():
            self._steps[name].update(latency=value["rows"], peak_memory_bytes=value["peak_memory_bytes"])
            if value["error"]:
                self._set_status("error")
                error = value["error"]
                self._steps[name]["error"] = error | {"message": f"latency: {error['message']}"}

    def finish(self) -> None:
        """Say that the report is whole."""
        self.finished = True

    def judge(self) -> None:
        """Judge the gates and find the frontier."""
        from smelt.evaluate.frontier import frontier

        for step in self.data["steps"]:
            gates = self.plan.gates_of(step["name"])
            step["gates"] = [
                g for gate in gates if (g := judge(gate, step, self._evidence(step))) is not None
            ]
        if self.status == "passed" and any(self._misses_a_gate(step) for step in self.data["steps"]):
            self._set_status("gate-failed")
        self._compare_dtypes()
        self.data["frontier"] = frontier(self.data["steps"], self.data["baseline"])

    def _compare_dtypes(self) -> None:
        """Say which sizes are not of the same kind of number as the baseline's."""
        base = self._steps.get(self.data["baseline"], {}).get("float_dtype")
        others: dict[str, list[str]] = {}
        for step in self.data["steps"]:
            if base and step["float_dtype"] not in (None, base):
                others.setdefault(step["float_dtype"], []).append(step["name"])
        for dtype, names in others.items():
            self.warn(
                warning(
                    "sizes-differ-in-dtype",
                    f"Sizes are not directly comparable: unquantized weights are {base} in"
                    f" '{self.data['baseline']}' and {dtype} in {', '.join(names)}.",
                )
            )

    def _evidence(self, step: Mapping[str, Any]) -> Evidence:
        """Return what intervals of the step's scores are computed from."""
        statistics = self.statistics
        return Evidence(statistics.get(step["name"], {}), statistics.get(self.data["baseline"], {}))

    def _misses_a_gate(self, step: Mapping[str, Any]) -> bool:
        """Tell whether `step` misses a gate; one that cannot be judged counts if the step is not optional."""
        optional = {s.name for s in self.plan.steps if s.optional}
        verdicts = [gate["passed"] for gate in step["gates"]]
        return False in verdicts or (None in verdicts and step["name"] not in optional)

    def is_deployable(self, name: str) -> bool:
        """Say whether one would deploy what a finished step made."""
        return self._steps[name]["deployable"] is True

    def untimed(self, failure: SmeltError) -> None:
        """Record that the times could not be taken at all, on the step that all are compared with."""
        self._set_status("error")
        self._steps[self.data["baseline"]]["error"] = as_json([failure.as_message()])[0]

    def current(self) -> dict[str, Any]:
        """Return the report as it stands; of a run that is not at its end, as one that was interrupted.

        So a run that is killed leaves a report that says so.
        """
        under_way = self.status == "passed" and not self.finished
        return {**self.data, "status": "interrupted"} if under_way else self.data

    def _set_status(self, status: str) -> None:
        self.status = self.data["status"] = status


def _compare(statistics: Mapping[str, Any], name: str, other: str | None) -> dict[str, Any]:
    """Return the paired differences of the step `name` to the step `other`, by metric; none without it."""
    from smelt.evaluate.significance import Statistics, compare

    if other is None or other == name or other not in statistics:
        return {}
    own, others = statistics[name], statistics[other]
    return {
        metric: dict(
            compare(Statistics.model_validate(own[metric]), Statistics.model_validate(others[metric]))
        )
        for metric in own
        if metric in others
    }


def _blank(name: str, stage: str, parent: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "stage": stage,
        "parent": parent,
        "status": "not-reached",
        "from_previous_run": False,
        **_EMPTY,
        "settings": settings,
        "warnings": [],
        "quality": {},
        "latency": [],
        "against_baseline": {},
        "against_parent": {},
        "gates": [],
        "test": None,
        "details": {},
    }


def _of_artifact(name: str, artifact: Artifact, cached: bool) -> dict[str, Any]:
    """Return what the report tells of an artifact, scored or not."""
    from smelt.evaluate.stored_floats import float_dtype

    manifest = artifact.manifest
    return {
        "status": "cached" if cached else "done",
        "format": artifact.format,
        "target": manifest.details.get("target"),
        "artifact": f"artifacts/{name}",
        "deployable": _is_deployable(artifact),
        "key": artifact.key,
        "parameters": manifest.details.get("parameters"),
        "size_bytes": artifact.size_bytes,
        "float_dtype": float_dtype(artifact),
        "seconds": manifest.seconds,
        "warnings": as_json(manifest.warnings),
        "details": {k: v for k, v in manifest.details.items() if k not in ("parameters", "target")},
    }


def _is_deployable(artifact: Artifact) -> bool:
    """Say whether one would deploy this: all but a torch model with quantized layers.

    Torch only computes what the runtime will compute, in float and slower; such a step is there to be
    scored and to be exported.
    """
    structure = artifact.path / "structure.json"
    if artifact.format != "torch" or not structure.is_file():
        return True
    edits = load_json(structure)["edits"]
    return all(edit["op"] != "quantize" for edit in edits)
