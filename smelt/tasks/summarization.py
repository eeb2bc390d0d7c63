"""Summarization: from a document to a summary."""

from __future__ import annotations

from smelt.tasks.text_to_text import TextToText


class Summarization(TextToText):
    """Summarization."""

    name = "summarization"
    suggested_metrics = ("rouge1", "rouge2", "rougeL", "rougeLsum")
    main_metric = "rougeL"


TASK = Summarization()
