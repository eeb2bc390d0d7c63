"""The first artifact of a recipe that begins with a model of the user's: a copy of it, as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smelt.core.artifact import Artifact, Manifest
from smelt.core.files import hash_of, sha256_of
from smelt.execute.head import Head
from smelt.execute.steps import Workshop
from smelt.look.coded_model import coded_model
from smelt.look.model_folder import read_config
from smelt.recipe.problem import has_classifier
from smelt.recipe.stages import ROOT


def import_root(shop: Workshop, source: Path, head: Head, fresh: bool) -> tuple[Artifact, bool]:
    """Bring the untouched model into the store; return it and whether it was there already.

    Raises:
        InputError: its codes cannot be taken over, or its weights are no numbers.
    """
    from smelt.runtime.models.import_model import import_model, source_files
    from smelt.runtime.models.places.finite_weights import require_finite_weights
    from smelt.runtime.text.write_rules import write_text_rules

    labels, rules, config = head.labels, head.rules, read_config(source)[0]
    coded = coded_model(source, config) is not None
    key = hash_of(
        {
            "stage": "model",
            "version": 4 if coded else 3,  # with 4 the bits of codes are told
            "files": {p.name: sha256_of(p) for p in source_files(source)},
            "task": shop.task,
            "labels": labels and labels[1],
            "problem_type": labels and labels[0],
            **head.key,
            "seed": shop.seed,
            **shop.remembered,
        }
    )

    def make(space: Path) -> Artifact:
        out = space / "out"
        out.mkdir()
        problem, names = labels or (None, None)
        notes = import_model(source, out, names, shop.seed, problem, head.sentences)
        new_head = bool(labels) and not has_classifier(config)
        require_finite_weights(source, new_head, bool(head.sentences))
        write_text_rules(out, rules)
        details = {**_facts(source, out, coded), **rules.model_dump(exclude_defaults=True), **shop.remembered}
        if new_head:
            details["new_head"] = True  # random, so nothing can learn from it
        manifest = Manifest(
            key=key,
            format="torch",
            task=shop.task,
            stage="model",
            settings={},
            seed=shop.seed,
            parent=None,
            versions=dict(shop.versions),
            warnings=notes,
            details=details,
        )
        return shop.store.commit(out, manifest, replace=fresh)

    return shop.obtain(ROOT, key, fresh, make)


def _facts(source: Path, out: Path, coded: bool) -> dict[str, Any]:
    """Return what is known of the model in `source`, which lies in `out` by now: weights, bits, licence."""
    from smelt.compress.quantize.coding import coded_bits
    from smelt.runtime.models.licence import licence_of
    from smelt.runtime.models.making.empty_model import empty_model
    from smelt.runtime.models.places.parameters import count_parameters
    from smelt.runtime.models.stored_dtype import stored_types

    details: dict[str, Any] = {"parameters": count_parameters(out)}
    if coded:
        details["bits_per_weight"] = coded_bits(empty_model(out)[0], stored_types(out).common.itemsize)
    if (licence := licence_of(source)) is not None:
        details["licence"] = licence  # what `smelt package` tells of it
    return details
