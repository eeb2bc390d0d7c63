"""Translation: from sentences of one language to sentences of another."""

from __future__ import annotations

from smelt.tasks.text_to_text import TextToText


class Translation(TextToText):
    """Translation."""

    name = "translation"
    rate_unit = "sentences/s"
    suggested_metrics = ("bleu", "chrf")
    main_metric = "bleu"


TASK = Translation()
