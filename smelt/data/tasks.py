"""The tasks and their traits: what code that is common to all tasks may ask of one.

Code asks for a trait and never compares the name of a task. All else that a task is stands in its file in
smelt/tasks/.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from smelt.core.errors import InputError

Task = Literal[
    "translation",
    "summarization",
    "speech-recognition",
    "text-classification",
    "language-modeling",
    "text-generation",
    "sentence-similarity",
    "masked-language-modeling",
    "token-classification",
    "question-answering",
    "image-classification",
    "image-text",
    "custom",
]
Modality = Literal["text", "image", "image-and-text", "audio", "arrays"]


@dataclass(frozen=True)
class TaskTraits:
    """What the samples, the model and the outputs of a task are."""

    samples: Literal["texts", "running-text", "prompts", "images", "captioned-images", "audio", "arrays"]
    """What is read: separate texts; one text, cut into windows; prompts with responses; files of images
    (smelt.data.images), with or without a text each, or of audio (smelt.data.audio); arrays."""
    architecture: Literal["encoder", "encoder-decoder", "decoder", "any"]
    output: Literal[
        "text",
        "next-token",
        "masked-tokens",
        "labels",
        "tags",
        "spans",
        "embedding",
        "joint-embeddings",
        "arrays",
    ]
    """What is scored: generated text, the probability of each next token or of masked tokens, labels of a
    sample, a tag for each of its words, a span of its second text, its embedding, those of an image and a
    text in one space, or arrays."""
    auto_class: str | None
    """The class of transformers that makes a model of a config; None for third-party graphs."""
    text_pair: Literal["joined", "separate"] | None = None
    """Whether a sample may have a second text, and whether the model gets both as one input."""
    optional_labels: bool = False
    """Whether a student can learn its teacher's outputs on samples without labels."""
    has_target_text: bool = False
    """Whether a sample has a second text with tokens of its own: a target, or the other text of a pair."""

    @property
    def modality(self) -> Modality:
        """What the inputs of the model are made from."""
        others: dict[str, Modality] = {
            "images": "image",
            "captioned-images": "image-and-text",
            "audio": "audio",
            "arrays": "arrays",
        }
        return others.get(self.samples, "text")

    @property
    def has_tokenizer(self) -> bool:
        """Whether inputs or targets are tokens of a text."""
        return self.modality in ("text", "image-and-text", "audio")

    @property
    def classifies(self) -> bool:
        """Whether the head has outputs of its own: for classes of samples or words, or for start and end."""
        return self.output in ("labels", "tags", "spans")

    @property
    def reads_images(self) -> bool:
        """Whether a sample has an image."""
        return self.modality in ("image", "image-and-text")

    @property
    def reads_media(self) -> bool:
        """Whether a sample has the path of an image, or of audio."""
        return self.reads_images or self.modality == "audio"

    @property
    def embeds(self) -> bool:
        """Whether the outputs are embeddings, which are compared with one another."""
        return self.output in ("embedding", "joint-embeddings")

    @property
    def generates(self) -> bool:
        """Whether the models can generate text; those of language modeling are scored without."""
        return self.architecture in ("encoder-decoder", "decoder")


_TEXT_TO_TEXT = TaskTraits("texts", "encoder-decoder", "text", "AutoModelForSeq2SeqLM", has_target_text=True)
TASK_TRAITS: dict[Task, TaskTraits] = {
    "translation": _TEXT_TO_TEXT,
    "summarization": _TEXT_TO_TEXT,
    "speech-recognition": TaskTraits(
        "audio", "encoder-decoder", "text", "AutoModelForSpeechSeq2Seq", has_target_text=True
    ),
    "text-classification": TaskTraits(
        "texts", "encoder", "labels", "AutoModelForSequenceClassification", "joined", optional_labels=True
    ),
    "language-modeling": TaskTraits("running-text", "decoder", "next-token", "AutoModelForCausalLM"),
    "text-generation": TaskTraits("prompts", "decoder", "text", "AutoModelForCausalLM", has_target_text=True),
    "sentence-similarity": TaskTraits(
        "texts",
        "encoder",
        "embedding",
        "AutoModel",
        "separate",
        optional_labels=True,
        has_target_text=True,
    ),
    "masked-language-modeling": TaskTraits(
        "running-text", "encoder", "masked-tokens", "AutoModelForMaskedLM"
    ),
    "token-classification": TaskTraits("texts", "encoder", "tags", "AutoModelForTokenClassification"),
    "question-answering": TaskTraits("texts", "encoder", "spans", "AutoModelForQuestionAnswering", "joined"),
    "image-classification": TaskTraits("images", "encoder", "labels", "AutoModelForImageClassification"),
    "image-text": TaskTraits(
        "captioned-images", "encoder", "joint-embeddings", "AutoModel", "separate", has_target_text=True
    ),
    # Arrays in, arrays out, of any meaning: for third-party ONNX graphs.
    "custom": TaskTraits("arrays", "any", "arrays", None),
}
ALL_TASKS: tuple[Task, ...] = get_args(Task)
# Of exported graphs that other stages may change.
GRAPH_TASKS: tuple[Task, ...] = tuple(task for task in ALL_TASKS if TASK_TRAITS[task].modality != "audio")


def task_traits(task: str) -> TaskTraits:
    """Return the traits of `task`.

    Raises:
        InputError: no such task, as of an artifact that another version of smelt made.
    """
    for name, traits in TASK_TRAITS.items():
        if name == task:
            return traits
    raise InputError(f"task: {task!r} is unknown. Supported: {', '.join(ALL_TASKS)}.", code="unknown-task")


def tasks_with(**traits: object) -> tuple[Task, ...]:
    """Return the tasks whose traits have these values."""
    return tuple(
        task
        for task, each in TASK_TRAITS.items()
        if all(getattr(each, name) == v for name, v in traits.items())
    )


def task_names(**traits: object) -> str:
    """Return the names of the tasks whose traits have these values, for a message."""
    return " and ".join(sorted(tasks_with(**traits)))


# The tasks of the supported model families; a model of arrays is a third-party graph.
TASKS: tuple[Task, ...] = tuple(task for task in ALL_TASKS if TASK_TRAITS[task].modality != "arrays")
