"""Knowledge distillation on the logits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from smelt.compress.distill.fit import check_student
from smelt.compress.distill.weights import LossWeights
from smelt.compress.train.run import train
from smelt.compress.train.settings import TrainingSettings, training_needs
from smelt.core.artifact import Artifact, Format
from smelt.core.data import SIMILARITY, TASKS, Split, Task
from smelt.core.errors import InputError, nearest
from smelt.core.stage import Context, Need, Settings, StepName

if TYPE_CHECKING:
    from smelt.compress.train.loop import Objective

Layers = int | list[int]


class StudentSettings(Settings):
    """Which layers the student copies: a number, or a list of their places counted from 0."""

    encoder_layers: Layers | None = Field(default=None, description="encoder of an encoder-decoder")
    decoder_layers: Layers | None = Field(default=None, description="decoder of an encoder-decoder")
    layers: Layers | None = Field(default=None, description="classification, language modeling: of the model")
    choose: Literal["spread", "first", "last"] = Field(
        default="spread", description="which ones, where a number is given; spread: see docs/distill.md"
    )

    @field_validator("encoder_layers", "decoder_layers", "layers")
    @classmethod
    def _positive(cls, value: Layers | None) -> Layers | None:
        if (isinstance(value, int) and value < 1) or value == []:
            raise ValueError("a student keeps at least one layer")
        return value


class DistillSettings(TrainingSettings):
    """Settings of `distill`."""

    student: StudentSettings | None = Field(
        default=None, description="layers to keep; without it the model trains as it is (recovery)"
    )
    teacher: StepName = Field(
        default="model", description="name of an earlier torch step; `model` is the untouched one"
    )
    temperature: float = Field(default=2.0, gt=0, description="softens both distributions")
    losses: LossWeights = Field(default=LossWeights(), description="weights of the loss's parts")


class Distill:
    """Train a student to predict what a teacher predicts, besides the labels.

    With `student`, the source's layers are thinned out first; without it the source itself is the
    student, which recovers what pruning or factorization lost better than labels alone do, because a
    teacher says of every word how likely it is. The loss is
    logits * T^2 * KL(softmax(teacher / T) || softmax(student / T)) + labels * cross-entropy.
    A classifier with several classes a text compares sigmoids class by class, one that gives a number
    takes mean squared errors instead of both parts; a sentence embedder learns the teacher's vectors and
    their cosines with each other, which needs only texts. After `quantize` the student trains through its
    codes, which are decided again at the end.

        - distill: {student: {decoder_layers: 1}, losses: {logits: 1.0, labels: 0.5}, epochs: 2}
        - distill: {student: {layers: 3}, losses: {embedding: 1.0, similarity: 1.0}}    # sentence-similarity
    """

    name: ClassVar[str] = "distill"
    accepts: ClassVar[frozenset[Format]] = frozenset({"torch"})
    produces: ClassVar[Format] = "torch"
    needs: ClassVar[frozenset[Need]] = frozenset({"train", "validation"})
    source: ClassVar[str] = (
        "Hinton et al. 2015, arXiv:1503.02531; layers: Shleifer & Rush 2020, arXiv:2010.13002;"
        " masking: transformers-research-projects distillation/distiller.py"
    )
    version: ClassVar[int] = 2
    settings_type: ClassVar[type[DistillSettings]] = DistillSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(TASKS)

    @classmethod
    def needs_with(cls, settings: DistillSettings, given: Collection[str]) -> frozenset[Need]:
        """Return what it needs with these settings."""
        return training_needs(settings)

    @classmethod
    def check_model(
        cls, settings: DistillSettings, config: Mapping[str, Any]
    ) -> tuple[list[tuple[str, str]], dict[str, Any]]:
        """Return what does not fit a model of this config, by setting, and the config of the result."""
        if settings.student is None:
            return [], dict(config)
        found, after = check_student(settings.student, config)
        return [(f"student.{setting}", message) for setting, message in found], after

    @classmethod
    def check_rows(
        cls, settings: DistillSettings, task: Task, data: Mapping[str, Split]
    ) -> list[tuple[str, str]]:
        """Return what of the settings does not fit the task or the rows, by setting."""
        found = settings.losses.unfit(task)
        lack = [data[n] for n in ("train", "validation") if n in data and not data[n].labelled]
        if task == SIMILARITY and settings.losses.of_vectors()["scores"] and lack:
            found.append(("losses.scores", f"the rows of {lack[0].origin} have no scores (column 'label')."))
        return found

    def __call__(self, src: Artifact, settings: DistillSettings, ctx: Context) -> None:
        """Make the student from `src`, train it against the teacher, write it to `ctx.out`."""
        from smelt.compress.distill.words import speak_as
        from smelt.compress.quantize.through_codes import load_trainable, settle
        from smelt.runtime.models.checkpoint import save_model

        teacher = _load_teacher(settings.teacher, ctx)
        model, edits = load_trainable(src, ctx)
        common = speak_as(teacher, ctx.ancestors[settings.teacher].path, model, src.path)
        if common is not None:
            ctx.facts["words_of_teacher"] = common
        _check_outputs(model, teacher, settings)
        if settings.student is not None:
            from smelt.compress.distill.student import keep_layers

            for stack in ("encoder_layers", "decoder_layers", "layers"):
                choice = getattr(settings.student, stack)
                if choice is not None:
                    edits, kept = keep_layers(model, edits, stack, choice, choose=settings.student.choose)
                    ctx.facts[f"kept_{stack}"] = kept
        ctx.facts["teacher"] = settings.teacher
        objective = distill_objective(teacher, settings)
        train(model, src, settings, ctx, objective=objective, edits=edits, stage=self.name)
        settle(model, ctx)
        ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))


def distill_objective(teacher: Any, settings: DistillSettings) -> Objective:
    """Return the mixed loss of `settings` with `teacher` (eval mode) run on the same batch."""
    import torch

    from smelt.runtime.models.sentence_model import is_sentence_model

    if is_sentence_model(teacher):
        from smelt.compress.distill.sentences import vectors_objective

        return vectors_objective(teacher, settings.losses)

    from smelt.compress.train.classifier_losses import training_loss
    from smelt.compress.train.loop import logits_of

    weights = settings.losses

    def objective(model: Any, batch: Any) -> Any:
        target = None
        if weights.logits:
            with torch.no_grad():
                target = logits_of(teacher.to(batch["labels"].device), batch)
        return training_loss(
            getattr(model, "module", model).config,
            logits_of(model, batch),
            batch["labels"],
            target,
            temperature=settings.temperature,
            logits_weight=weights.logits,
            labels_weight=weights.labels,
            smoothing=settings.label_smoothing if model.training else 0.0,
        )

    return objective


def _load_teacher(name: str, ctx: Context) -> Any:
    from smelt.runtime.models.checkpoint import load_model

    artifact = ctx.ancestors.get(name)
    if artifact is None:
        known = ", ".join(ctx.ancestors)
        raise InputError(
            f"distill: the teacher '{name}' is no step before this one. There are: {known}."
            f"{nearest(name, ctx.ancestors)}"
        )
    if artifact.format != "torch":
        raise InputError(
            f"distill: the teacher '{name}' is stored as {artifact.format}; it must be a torch step."
        )
    facts = artifact.manifest.facts
    if facts.get("untrained") or facts.get("new_head"):
        what = "weights" if facts.get("untrained") else "classifier"
        trained = [n for n, a in ctx.ancestors.items() if a.manifest.stage in ("finetune", "distill")]
        how = (
            f"teacher: {trained[0]}" if trained else "put a finetune before it, and name that as the teacher"
        )
        raise InputError(
            f"distill: the {what} of the teacher '{name}' is random; name a trained step: {how}."
        )
    teacher, _ = load_model(artifact.path)
    return teacher.requires_grad_(False)


def _check_outputs(model: Any, teacher: Any, settings: DistillSettings) -> None:
    from smelt.compress.train.classifier_losses import problem_of
    from smelt.runtime.causal import is_causal
    from smelt.runtime.models.sentence_model import is_sentence_model

    if is_sentence_model(model):
        from smelt.compress.distill.sentences import require_fit

        require_fit(model, teacher, settings.losses)
        return
    ours, theirs = model.config, teacher.config
    if ours.is_encoder_decoder != theirs.is_encoder_decoder:
        raise InputError(f"distill: a {theirs.model_type} teacher cannot teach a {ours.model_type} student.")
    words, known = (getattr(c, "decoder_vocab_size", None) or c.vocab_size for c in (ours, theirs))
    if (ours.is_encoder_decoder or is_causal(ours.to_dict())) and words != known:
        raise InputError(
            f"distill: the teacher's vocabulary has {known} tokens, the student's"
            f" {words}. Logits can be compared only over the same vocabulary."
        )
    if not ours.is_encoder_decoder and ours.id2label != theirs.id2label:
        raise InputError(
            f"distill: the teacher's labels are {theirs.id2label}, the student's {ours.id2label}."
            " They must agree."
        )
    if not ours.is_encoder_decoder and problem_of(ours) != problem_of(theirs):
        raise InputError(
            f"distill: the teacher's problem type is {problem_of(theirs)}, the student's {problem_of(ours)}."
            " They must agree."
        )
