"""Load the teachers (one step, several steps, or models in folders), and map their tokens to the student's.

A teacher with more tokens than its student is mapped to the student's tokens. Shapes: V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smelt.compress.distill.check_config import require_same_tokens
from smelt.compress.distill.ensembles import make_ensemble
from smelt.compress.distill.settings import DistillSettings, TeacherSettings
from smelt.compress.distill.teacher_labels import label_errors
from smelt.compress.trim_vocabulary.select_tokens import map_to_teacher_tokens
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import json_hash, read_json_object, sha256_of
from smelt.core.messages import with_article
from smelt.data.labels import class_names
from smelt.models.checkpoint import load_model, load_tokenizer
from smelt.models.families.registry import predicts_tokens
from smelt.models.image_text_model import returns_embeddings
from smelt.models.text_rules import read_sentence_rules
from smelt.stage import Context

_TOKEN_ID_INPUTS = ("input_ids", "decoder_input_ids")


def map_teacher_tokens(
    teacher: Any, teacher_folder: Path, student: Any, student_folder: Path
) -> list[int] | None:
    """Make `teacher` take the student's token ids, and return logits of the student's tokens only.

    The softmax of these logits is the teacher's distribution over the student's tokens. Models of one
    tokenizer may have rows without a token, to pad their matrices (Qwen2.5: 151,936 rows, with 7 billion
    parameters 152,064); those of the teacher alone get no probability, nor do those of the student alone.

    Args:
        teacher: changed in place if its vocabulary differs; usable for nothing else afterwards.
        teacher_folder: where it was loaded from.
        student: the student model.
        student_folder: where it was loaded from; its `vocabulary.json` lists the kept tokens.

    Returns:
        The teacher's token id for each of the student's tokens, -1 for a row that the teacher lacks; None if
        the vocabularies are the same.

    Raises:
        InputError: the student has tokens that the teacher lacks.
    """
    student_size, teacher_size = (
        int(getattr(model.config, "decoder_vocab_size", None) or model.config.vocab_size)
        for model in (student, teacher)
    )
    token_map = map_to_teacher_tokens(student_folder, teacher_folder, student_size, teacher_size)
    if token_map is not None:
        _select_tokens(teacher, token_map)
    elif student_size == teacher_size:
        return None
    else:
        _require_padding(teacher_folder, student_folder, teacher_size, student_size)
        token_map = [*range(min(student_size, teacher_size)), *[-1] * (student_size - teacher_size)]
        _resize_logits(teacher, student_size)
    teacher.config.vocab_size = student_size
    if getattr(teacher.config, "decoder_vocab_size", None) is not None:
        teacher.config.decoder_vocab_size = student_size
    return token_map


def _select_tokens(teacher: Any, places: Sequence[int]) -> None:
    """Map the ids that `teacher` reads by `places`, and select the logits of these tokens."""
    table = torch.tensor(places)

    def read(module: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, Any]:
        return inputs, {n: table.to(v.device)[v] if n in _TOKEN_ID_INPUTS else v for n, v in named.items()}

    def map_outputs(module: Any, inputs: tuple[Any, ...], result: Any) -> Any:
        result.logits = result.logits.index_select(-1, table.to(result.logits.device))
        return result

    teacher.register_forward_pre_hook(read, with_kwargs=True)
    if predicts_tokens(teacher):
        teacher.register_forward_hook(map_outputs)


# Of a row that the teacher lacks, below its least likely token: exp of it is 0 at any useful temperature, and
# in float16 it is finite.
_ABSENT_LOGIT_MARGIN = 1000.0


def _resize_logits(teacher: Any, words: int) -> None:
    """Drop logits of `teacher` from row `words` on, or add those of rows that it lacks."""

    def resize(module: Any, inputs: tuple[Any, ...], result: Any) -> Any:
        logits = result.logits[..., :words]
        num_missing = words - logits.shape[-1]
        if num_missing:
            lowest = logits.amin(dim=-1, keepdim=True) - _ABSENT_LOGIT_MARGIN
            logits = torch.cat([logits, lowest.expand(*logits.shape[:-1], num_missing)], dim=-1)
        result.logits = logits
        return result

    if predicts_tokens(teacher):
        teacher.register_forward_hook(resize)


def _require_padding(teacher: Path, student: Path, teacher_rows: int, student_rows: int) -> None:
    """Require that the rows which only one of two models has belong to no token of their tokenizer.

    Raises:
        InputError: `vocabulary-mismatch`.
    """
    student_ids, teacher_ids = (load_tokenizer(folder).get_vocab() for folder in (student, teacher))
    max_id = max(*student_ids.values(), *teacher_ids.values())
    if student_ids != teacher_ids or max_id >= min(teacher_rows, student_rows):
        reason = (
            f"there are tokens up to id {max_id}" if student_ids == teacher_ids else "the tokenizers differ"
        )
        raise InputError(
            f"distill: the teacher's vocabulary has {teacher_rows} tokens, but the student's has"
            f" {student_rows}, and {reason}. They may differ only by rows without a token; use a teacher"
            " with the same vocabulary.",
            code="vocabulary-mismatch",
            setting="teacher",
        )


@dataclass(frozen=True)
class Teacher:
    """A teacher model, in eval mode, on the CPU.

    name: of its step, or its folder. folder: where it was loaded from. key: of its artifact; None for a
    folder, which `identity` identifies.
    """

    name: str
    model: Any
    folder: Path
    key: str | None
    identity: str


def load_teachers(settings: DistillSettings, src: Artifact, workspace: Path, ctx: Context) -> list[Teacher]:
    """Return all teachers that the settings name.

    Args:
        settings: of the step.
        src: the step's input; the tokenizer of a teacher in a folder must be the same.
        workspace: an empty folder for converted models.
        ctx: the earlier steps; collects warnings.

    Raises:
        InputError: unknown step, wrong format, random weights or another tokenizer.
    """
    return [
        _teacher_of_step(teacher, ctx)
        if isinstance(teacher, str)
        else _teacher_of_folder(teacher, src, workspace / str(index), ctx)
        for index, teacher in enumerate(settings.all_teachers())
    ]


def _teacher_of_step(name: str, ctx: Context) -> Teacher:

    artifact = ctx.ancestors.get(name)
    if artifact is None:
        available = ", ".join(ctx.ancestors)
        raise InputError(
            f"distill: the teacher '{name}' is not an earlier step. Available: {available}."
            f"{did_you_mean(name, ctx.ancestors)}",
            code="unknown-step",
            setting="teacher",
        )
    if artifact.format != "torch":
        raise InputError(
            f"distill: the teacher '{name}' is stored as {artifact.format}. Use a step with a torch model.",
            code="wrong-format",
            setting="teacher",
        )
    details = artifact.manifest.details
    if details.get("untrained") or details.get("new_head"):
        part = "weights" if details.get("untrained") else "classifier"
        trained = [n for n, a in ctx.ancestors.items() if a.manifest.stage in ("finetune", "distill")]
        remedy = f"set teacher: {trained[0]}" if trained else "add a finetune step and set it as teacher"
        raise InputError(
            f"distill: the {part} of the teacher '{name}' is not trained. Use a trained teacher: {remedy}.",
            code="untrained-teacher",
            setting="teacher",
        )
    model, _ = load_model(artifact.path)
    return Teacher(name, model.requires_grad_(False), artifact.path, artifact.key, artifact.key)


def _teacher_of_folder(settings: TeacherSettings, src: Artifact, space: Path, ctx: Context) -> Teacher:
    from smelt.models.import_model import import_model
    from smelt.models.weight_files import source_files

    folder = Path(settings.model)
    if ctx.traits.has_tokenizer:
        require_same_tokens(folder, src.path, "teacher")
    space.mkdir(parents=True)
    rules = (
        read_sentence_rules(folder) or read_sentence_rules(src.path)
        if ctx.traits.output == "embedding"
        else None
    )
    notes = import_model(folder, space, sentences=rules)
    ctx.warnings.extend(note.with_prefix(f"distill: teacher {folder.name}: ") for note in notes)
    try:
        model, _ = load_model(space)
    except InputError as error:  # report the folder that the settings name
        raise InputError(str(error).replace(str(space), str(folder)), code=error.code) from error
    if ctx.traits.classifies and not hasattr(model, "num_labels"):
        raise InputError(
            f"distill: the teacher {folder} is {with_article(type(model).__name__)}, not a classifier."
            " Use a classifier as teacher.",
            code="different-kind",
            setting="teacher",
        )
    identity = json_hash({path.name: sha256_of(path) for path in source_files(folder)})
    return Teacher(str(folder), model.requires_grad_(False), space, None, identity)


def combine_teachers(
    teachers: Sequence[Teacher], student: Any, settings: DistillSettings, src: Artifact
) -> Any:
    """Return the only teacher, or all combined into one.

    Args:
        teachers: of the step.
        student: None if there is none yet.
        settings: of the step, for its task.
        src: the step's input.

    Raises:
        InputError: they cannot be combined.
    """
    if len(teachers) == 1:
        return teachers[0].model
    names = [teacher.name for teacher in teachers]
    return make_ensemble(
        [teacher.model for teacher in teachers], names, student, settings.temperature,
        uses_labels=settings.uses_labels(), source=read_json_object(src.path / "config.json"),
    )  # fmt: skip


def labels_by_teacher(teachers: Sequence[Teacher]) -> list[dict[str, Any]]:
    """Return, for the report, the labels of each classifier: `{"teacher": name, "labels": [...]}`."""
    return [
        {"teacher": teacher.name, "labels": class_names(teacher.model.config.to_dict())}
        for teacher in teachers
    ]


def align_vocabularies(
    teachers: Sequence[Teacher], student: Any, student_folder: Path, ctx: Context
) -> list[list[int] | None]:
    """Map each teacher's tokens to those of `student`, loaded from `student_folder`, and return the maps.

    The report gets the number of common tokens if a teacher has more.
    """
    if not ctx.traits.has_tokenizer or ctx.traits.reads_images:  # with texts: of one vocabulary
        return [None] * len(teachers)
    token_maps = [
        map_teacher_tokens(teacher.model, teacher.folder, student, student_folder) for teacher in teachers
    ]
    common = [sum(token >= 0 for token in token_map) for token_map in token_maps if token_map is not None]
    if common:
        ctx.details["words_of_teacher"] = max(common)
    return token_maps


def teacher_identity(
    teachers: Sequence[Teacher],
    combined: Any,
    token_maps: Sequence[Sequence[int] | None],
    student: Any,
    settings: DistillSettings,
    ctx: Context,
) -> dict[str, Any]:
    """Return everything that the cached outputs of the teachers depend on, for the cache key.

    combined: the result of `combine_teachers`.
    """
    keys = [teacher.key for teacher in teachers if teacher.key is not None]
    identity: dict[str, Any] = {
        # outputs of teachers in folders are removed together with the original model
        "artifacts": keys or [artifact.key for artifact in list(ctx.ancestors.values())[:1]],
        "teachers": [teacher.identity for teacher in teachers],
        "words": [None if token_map is None else json_hash(list(token_map)) for token_map in token_maps],
    }
    if len(teachers) > 1:
        labels = getattr(student.config, "id2label", None)
        identity |= {"averaged_at": settings.temperature, "labels": labels and list(labels.values())}
        identity["combination"] = combined.combination
    return identity


def check_outputs(model: Any, teacher: Any, settings: DistillSettings, several: bool) -> None:
    """Require that outputs of `teacher` can be compared with those of the student, `model`.

    several: it is one of several teachers; their labels are checked together.

    Raises:
        InputError: vocabulary, labels or kind of model differ.
    """
    from smelt.models.families.registry import family_of

    student_config, teacher_config = model.config, teacher.config
    kinds = [family.input_kind if (family := family_of(network)) else "texts" for network in (model, teacher)]
    if kinds[0] != kinds[1]:
        raise InputError(
            f"distill: the teacher's inputs are {kinds[1]}, but the student's are {kinds[0]}. Use a"
            " teacher with the same inputs.",
            code="different-kind",
            setting="teacher",
        )
    if kinds[0] == "texts" and student_config.vocab_size != teacher_config.vocab_size:
        raise InputError(
            f"distill: the teacher's vocabulary has {teacher_config.vocab_size} tokens, but the student's has"
            f" {student_config.vocab_size}. Both models read the same tokens; use a teacher with the same"
            " vocabulary.",
            code="vocabulary-mismatch",
            setting="teacher",
        )
    if kinds[0] == "arrays":
        from smelt.compress.distill.objective import require_equal_outputs

        require_equal_outputs(model, teacher)
        return
    if returns_embeddings(model):
        from smelt.compress.distill.objective import require_comparable_vectors

        for training in settings.phase_settings():
            require_comparable_vectors(model, teacher, training.losses)
        return
    if student_config.is_encoder_decoder != teacher_config.is_encoder_decoder:
        raise InputError(
            f"distill: {with_article(teacher_config.model_type)} model cannot be the teacher of"
            f" {with_article(student_config.model_type)} model: only one of them is an encoder-decoder. Use"
            " a teacher of the same kind.",
            code="different-kind",
            setting="teacher",
        )
    vocab, teacher_vocab = (
        getattr(c, "decoder_vocab_size", None) or getattr(c, "vocab_size", None)
        for c in (student_config, teacher_config)
    )
    if predicts_tokens(model) and vocab != teacher_vocab:
        raise InputError(
            f"distill: the teacher's vocabulary has {teacher_vocab} tokens, but the student's has {vocab}."
            " Logits can be compared only over the same vocabulary; use a teacher with the same"
            " vocabulary.",
            code="vocabulary-mismatch",
            setting="teacher",
        )
    if not student_config.is_encoder_decoder and not several:
        for error in label_errors(student_config.to_dict(), teacher_config.to_dict()):
            raise InputError(f"distill: {error.message}", code=error.code, setting=error.setting)
