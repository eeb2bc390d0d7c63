"""What techniques.py prints: arms by seed, and how far each is from its control."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paired_intervals import (
    Interval,
    interval_over_seeds,
    loss_difference_interval,
    mean_loss,
    merge_seeds,
    score_difference_interval,
    seed_difference_interval,
)

from smelt.evaluate.significance import Statistics, metric_value


@dataclass(frozen=True)
class Group:
    """arms: what was measured of each, by seed. against: each one's control; else the first arm."""

    name: str
    arms: dict[str, list[dict[str, Any]]]
    against: Mapping[str, str]

    def control(self, arm: str) -> str:
        """Return the name of the arm that `arm` is compared with."""
        return self.against.get(arm, next(iter(self.arms)))


def as_values(group: Group) -> dict[str, Any]:
    """Return, by arm, losses and BLEU with intervals over seeds, and differences over seeds and rows."""
    found = {}
    for arm, runs in group.arms.items():
        if not runs:
            continue
        losses = [mean_loss(run["nats"], run["tokens"]) for run in runs]
        values: dict[str, Any] = {
            "parameters": [run["parameters"] for run in runs],
            "seconds": [run["seconds"] for run in runs],
            "losses": losses,
            "kl": [mean_loss(run["kl"], run["tokens"]) for run in runs],
            "loss": asdict(interval_over_seeds(losses)),
            "bleu": {beams: _bleu(runs, beams) for beams in runs[0]["bleu"]},
        }
        control = group.control(arm)
        others = group.arms.get(control, [])
        if control != arm and others and (apart := _differences(runs, others)):
            values["against"] = {"control": control, **apart}
        found[arm] = values
    return found


def _bleu(runs: list[dict[str, Any]], beams: str) -> dict[str, Any]:
    scores = [metric_value(each) for each in _statistics(runs, beams)]
    return {"scores": scores, **asdict(interval_over_seeds(scores))}


def _statistics(runs: list[dict[str, Any]], beams: str) -> list[Statistics]:
    return [Statistics.model_validate(run["bleu"][beams]) for run in runs]


def _differences(runs: list[dict[str, Any]], others: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the differences to the control, of the seeds that both have; empty where there is none."""
    if others[0]["details"]:  # else it is the untouched model, which has no seed
        shared = {run["seed"] for run in runs} & {run["seed"] for run in others}
        runs, others = ([run for run in each if run["seed"] in shared] for each in (runs, others))
    if not runs:
        return {}
    own, other = ([mean_loss(run["nats"], run["tokens"]) for run in each] for each in (runs, others))
    nats, other_nats = ([run["nats"] for run in each] for each in (runs, others))
    found: dict[str, Any] = {
        "seeds": len(runs),
        "loss_over_seeds": asdict(seed_difference_interval(own, other)),
        "loss_over_rows": asdict(loss_difference_interval(nats, other_nats, runs[0]["tokens"])),
    }
    both = [beams for beams in runs[0]["bleu"] if beams in others[0]["bleu"]]
    for beams in both:
        one, two = _statistics(runs, beams), _statistics(others, beams)
        scores = [metric_value(each) for each in one], [metric_value(each) for each in two]
        found[f"bleu_{beams}_over_seeds"] = asdict(seed_difference_interval(*scores))
        found[f"bleu_{beams}_over_rows"] = asdict(
            score_difference_interval([merge_seeds(one)], [merge_seeds(two)])
        )
    if len(both) == 2:
        found |= _beam_gains(runs, others, *both)
    return found


def _beam_gains(
    runs: list[dict[str, Any]], others: list[dict[str, Any]], few: str, many: str
) -> dict[str, Any]:
    """Return by how much more BLEU grows with `few` beams than with `many`, over the control's."""
    sides = [
        _statistics(each, beams) for each, beams in ((runs, few), (others, many), (others, few), (runs, many))
    ]
    by_seed = [[metric_value(each) for each in side] for side in sides]
    count = max(map(len, by_seed))
    by_seed = [values * count if len(values) == 1 else values for values in by_seed]
    gains = [a + b - c - d for a, b, c, d in zip(*by_seed, strict=True)]
    plus, minus = [merge_seeds(side) for side in sides[:2]], [merge_seeds(side) for side in sides[2:]]
    return {
        f"bleu_{few}_less_{many}_over_seeds": asdict(interval_over_seeds(gains)),
        f"bleu_{few}_less_{many}_over_rows": asdict(score_difference_interval(plus, minus)),
    }


def draw_table(group: Group, values: Mapping[str, Any]) -> str:
    """Return the group's table in Markdown; brackets are 95 % intervals."""
    lines = [
        f"| {group.name} | parameters | loss by seed | KL | against | over seeds | over rows | time, s |",
        "|:--|--:|--:|--:|:--|--:|--:|--:|",
    ]
    for arm, each in values.items():
        apart = each.get("against")
        cells = [arm, f"{each['parameters'][0]:,}", ", ".join(f"{value:.3f}" for value in each["losses"])]
        cells.append(", ".join(f"{value:.4f}" for value in each["kl"]))
        cells += (
            [
                apart["control"],
                interval_text(apart["loss_over_seeds"], 3),
                interval_text(apart["loss_over_rows"], 3),
            ]
            if apart
            else [""] * 3
        )
        lines.append("| " + " | ".join([*cells, f"{each['seconds'][0]:.1f}"]) + " |")
    written = {arm: each for arm, each in values.items() if each["bleu"]}
    if written:
        lines += [
            "",
            f"| {group.name} | beams | BLEU by seed | against | over seeds | over rows |",
            "|:--|--:|--:|:--|--:|--:|",
        ]
    for arm, each in written.items():
        apart = each.get("against", {})
        for beams, score in each["bleu"].items():
            lines.append(
                _line(arm, beams, ", ".join(f"{v:.2f}" for v in score["scores"]), apart, f"bleu_{beams}")
            )
        for name in apart:
            if "_less_" in name and name.endswith("_over_rows"):
                start = name.removesuffix("_over_rows")
                lines.append(
                    _line(arm, start.removeprefix("bleu_").replace("_less_", " less "), "", apart, start)
                )
    return "\n".join(lines)


def _line(arm: str, beams: str, scores: str, apart: Mapping[str, Any], start: str) -> str:
    cells = [arm, beams, scores]
    if f"{start}_over_rows" in apart:
        cells += [
            apart["control"],
            interval_text(apart[f"{start}_over_seeds"], 2),
            interval_text(apart[f"{start}_over_rows"], 2),
        ]
    else:
        cells += [""] * 3
    return "| " + " | ".join(cells) + " |"


def interval_text(interval: Mapping[str, float | None], digits: int) -> str:
    """Write a difference with its interval, where it has one."""
    found = Interval(**interval)  # type: ignore[arg-type]
    if found.low is None or found.high is None:
        return f"{found.value:+.{digits}f}"
    return f"{found.value:+.{digits}f} [{found.low:+.{digits}f}, {found.high:+.{digits}f}]"
