"""Write the front matter of a model card, with scores in the form `model-index`.

Source: huggingface_hub's repocard_data.py, `eval_results_to_model_index`.
"""

from __future__ import annotations

import re
from typing import Any

from smelt.export.package.package_format import PackageOrigin

_TAGS = {"language-modeling": "text-generation"}  # all other tasks have the Hub's own names
_CARD = " (its model card)"


def card_front_matter(task: str, origin: PackageOrigin, library: str) -> str:
    """Return YAML: licence, library, task and scores.

    Args:
        task: as in a recipe.
        origin: the artifact's origin.
        library: the library that opens the folder.
    """
    import yaml

    tag = _TAGS.get(task, task)
    front: dict[str, Any] = {"library_name": library, "pipeline_tag": tag, "tags": ["smelt"]}
    front |= _hub_licence(origin.licence)
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


def _hub_licence(text: str | None) -> dict[str, str]:
    """Return the licence in the Hub's terms; `other` with a name if it is not one of them."""
    if text is None:
        return {}
    word = text.removesuffix(_CARD)
    if re.fullmatch(r"[a-z0-9][a-z0-9.\-]*", word):
        return {"license": word}
    return {"license": "other", "license_name": _slug(word)}


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._/-]+", "-", text).strip("-") or "data"
