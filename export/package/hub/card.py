"""The front matter of a model card: what the Hub shows of a model, its scores in the form `model-index`.

Source: huggingface_hub's repocard_data.py, `eval_results_to_model_index`.
"""

from __future__ import annotations

import re
from typing import Any

from smelt.export.package.form import Origin

_TAGS = {"language-modeling": "text-generation"}  # all other tasks have the Hub's own words
_CARD = " (its model card)"


def front_matter(task: str, origin: Origin, library: str) -> str:
    """Return YAML: licence, library, task and scores.

    Args:
        task: as in a recipe.
        origin: what is known of the artifact.
        library: which library opens the folder.
    """
    import yaml

    tag = _TAGS.get(task, task)
    front: dict[str, Any] = {"library_name": library, "pipeline_tag": tag, "tags": ["smelt"]}
    front |= _licence(origin.licence)
    scores = [score for score in origin.scores if score.value is not None]
    if scores:
        data = origin.data or origin.split
        found = [
            {"type": s.key, "value": s.value, "name": f"{s.metric} {s.text} of {s.n:,}", "args": s.signature}
            for s in scores
        ]
        result = {
            "task": {"type": tag, "name": task},
            "dataset": {"type": _slug(data), "name": data, "split": origin.split},
            "metrics": [one | {"args": {"signature": one["args"]}} for one in found],
        }
        front["model-index"] = [{"name": origin.run or "model", "results": [result]}]
    text: str = yaml.safe_dump(front, sort_keys=False, allow_unicode=True)
    return text


def _licence(said: str | None) -> dict[str, str]:
    """Return the licence in the Hub's words; `other` with a name where it is none of its short words."""
    if said is None:
        return {}
    word = said.removesuffix(_CARD)
    if re.fullmatch(r"[a-z0-9][a-z0-9.\-]*", word):
        return {"license": word}
    return {"license": "other", "license_name": _slug(word)}


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._/-]+", "-", text).strip("-") or "data"
