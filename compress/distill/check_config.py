"""Check an external student, the copied layers and the losses from config.json alone, and write the student.

An external student has an own config and random weights, or is a checkpoint; it has no layers of the step's
model. The checks import no torch; it is imported when a student is made.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from smelt.compress.distill.layer_map import check_layer_map, module_pairs
from smelt.compress.distill.settings import DistillSettings, StudentSettings
from smelt.compress.distill.teacher_labels import (
    ModelLabels,
    label_errors,
    new_student_labels,
    planned_labels,
    several_teacher_errors,
)
from smelt.compress.trim_vocabulary.select_tokens import read_kept_tokens
from smelt.core.artifact import Artifact
from smelt.core.errors import DEFAULT_CODE, InputError, did_you_mean
from smelt.core.files import path_exists, read_json_object
from smelt.core.messages import Message, error_message, with_article
from smelt.data.labels import REGRESSION, has_classifier
from smelt.data.splits import Split
from smelt.data.tasks import Task, task_traits
from smelt.models.families.config_keys import set_config_value
from smelt.models.families.family import MODULE_PREFIX, Family
from smelt.models.families.layout import STACK_NAMES
from smelt.models.families.registry import FAMILIES, find_family, is_user_module
from smelt.models.text_rules import position_limit
from smelt.stage import Context
from smelt.tasks.read_split import UNLABELED, UNLABELED_TASKS

_MAX_LISTED = 10  # modules that a message names
# Config keys that define the outputs; the student gets the teacher's.
_OUTPUT_KEYS = ("id2label", "label2id", "problem_type")


def read_student_config(student: StudentSettings) -> dict[str, Any]:
    """Return the config of a student given by file or folder; empty if there is none."""
    path = Path(student.config or student.model or "")
    return read_json_object(path if path.is_file() else path / "config.json")


def check_external_student(
    student: StudentSettings, teacher_config: Mapping[str, Any]
) -> tuple[list[Message], dict[str, Any]]:
    """Check a student's config against that of the step's model.

    Returns:
        The errors, each with its setting, and the config of the student.
    """
    setting = "config" if student.config else "model"
    if not path_exists(Path(student.config or student.model or "")):
        return [], {}  # the plan reports it
    try:
        student_config = read_student_config(student)
    except InputError as error:
        return [error_message(error.code or DEFAULT_CODE, str(error), setting=setting)], {}
    teacher_size, own_size = teacher_config.get("vocab_size"), student_config.get("vocab_size")
    mismatch = _incompatibility(student_config, teacher_config)
    if (
        mismatch is None
        and student.model
        and isinstance(teacher_size, int)
        and isinstance(own_size, int)
        and teacher_size != own_size
        and not _are_padding(student.model, teacher_size, own_size)
    ):
        text = (
            f"the student's vocabulary has {own_size} tokens, but the model's has {teacher_size}; they may"
            " differ only by rows without a token. Use a student with the same vocabulary."
        )
        mismatch = error_message("vocabulary-mismatch", text)
    if mismatch is not None:
        return [error_message(mismatch.code, mismatch.message, setting=setting)], {}
    outputs = {name: teacher_config[name] for name in _OUTPUT_KEYS if name in teacher_config}
    size = own_size if student.model else teacher_size
    return [], {**student_config, **outputs} | ({} if size is None else {"vocab_size": size})


def _are_padding(folder: str, *sizes: int) -> bool:
    """Return whether the tokenizer in `folder` has no token in the rows that only one of two models has."""
    from smelt.models.checkpoint import load_tokenizer

    try:
        tokenizer = load_tokenizer(Path(folder))
    except InputError:
        return False
    tokens: dict[str, int] = tokenizer.get_vocab()
    # without files, transformers makes a tokenizer of special tokens
    return tokens.keys() > set(tokenizer.all_special_tokens) and max(tokens.values()) < min(sizes)


def _incompatibility(student_config: Mapping[str, Any], config: Mapping[str, Any]) -> Message | None:
    """Return why a teacher with `config` cannot train a student with `student_config`; None if it can."""
    family, teacher_family = find_family(student_config), find_family(config)
    if family is None:
        supported = ", ".join(FAMILIES)
        text = f"'{student_config.get('model_type')}' is not a supported family; supported are {supported}."
        return error_message("unsupported-family", text)
    if teacher_family is not None and (family.architecture, family.input_kind) != (
        teacher_family.architecture,
        teacher_family.input_kind,
    ):
        text = (
            f"a {family.name} student cannot be trained by a {teacher_family.name} teacher. Use a student of"
            " the same kind."
        )
        return error_message("different-kind", text)
    sizes = image_size_difference(student_config, config)
    return None if sizes is None else error_message("image-size-mismatch", sizes)


def image_size_difference(student_config: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Return the error text if the student's image size differs from the model's, else None."""
    student_size, teacher_size = student_config.get("image_size"), config.get("image_size")
    if None in (student_size, teacher_size) or student_size == teacher_size:
        return None
    return f"the image size is {student_size} pixels, but the model's is {teacher_size}; they must be equal."


def make_external_student(
    student: StudentSettings, src: Artifact, teacher: Any, folder: Path, ctx: Context
) -> None:
    """Write the student into the empty folder `folder`, with the tokenizer of `src`.

    Args:
        student: settings with a config (weights are initialized with the recipe's seed) or a checkpoint.
        src: the step's input.
        teacher: the model whose outputs the student learns.
        folder: becomes a model folder.
        ctx: task and seed; collects warnings.

    Raises:
        InputError: the model cannot be made, or its tokenizer differs.
    """
    from smelt.models.checkpoint import copy_tokenizer
    from smelt.models.import_model import import_model
    from smelt.models.new_model import create_model
    from smelt.tasks.samples import model_problem_type

    classifies = ctx.traits.classifies
    labels = list(teacher.config.id2label.values()) if classifies else []
    problem = model_problem_type(teacher.config) if classifies else None
    sentences = getattr(teacher, "sentence_rules", None)
    if student.config is not None:
        size = read_json_object(src.path / "config.json").get("vocab_size")
        notes = create_model(
            read_student_config(student) | ({} if size is None else {"vocab_size": size}), src.path, folder,
            task=ctx.task, seed=ctx.seed, labels=labels, problem=problem, sentences=sentences,
        )  # fmt: skip
        copy_tokenizer(src.path, folder)  # with the files next to it: shortlist, kept tokens
        ctx.warnings.extend(note.with_prefix("distill: student: ") for note in notes)
        return
    source = Path(student.model or "")
    if ctx.traits.has_tokenizer:
        require_same_tokens(source, src.path, "student")
    notes = import_model(
        source, folder, labels or None, ctx.seed, problem, sentences, str(ctx.traits.auto_class)
    )
    copy_tokenizer(src.path, folder)
    ctx.warnings.extend(note.with_prefix("distill: student: ") for note in notes)


def require_same_tokens(folder: Path, other: Path, whose: str) -> None:
    """Require that the tokenizers of two folders have the same ids for the same tokens.

    If the vocabulary of `other` was trimmed, a teacher may have more tokens; the kept ones must have the
    ids that they had before (see `smelt.compress.trim_vocabulary.select_tokens`).

    whose: role of the model in `folder`, for the message; `other` is the step's input.

    Raises:
        InputError: the tokenizers differ.
    """
    from smelt.models.checkpoint import load_tokenizer

    own_ids, other_ids = load_tokenizer(folder).get_vocab(), load_tokenizer(other).get_vocab()
    kept_tokens = read_kept_tokens(other)
    if whose == "teacher" and kept_tokens is not None and read_kept_tokens(folder) != kept_tokens:
        original_ids = {
            token: kept_tokens.ids[token_id]
            for token, token_id in other_ids.items()
            if token_id < len(kept_tokens.ids)
        }
        if all(own_ids.get(token) == token_id for token, token_id in original_ids.items()):
            return
    mismatches = [token for token in own_ids if other_ids.get(token) != own_ids[token]]
    if mismatches or len(own_ids) != len(other_ids):
        token = mismatches[0] if mismatches else next(token for token in other_ids if token not in own_ids)
        raise InputError(
            f"distill: the tokenizer of the {whose} {folder} differs from the model's: the id of '{token}'"
            f" is {own_ids.get(token)} instead of {other_ids.get(token)}. Both models must have the same"
            " tokenizer.",
            code="tokenizer-mismatch",
        )


def check_student(student: Any, config: Mapping[str, Any]) -> tuple[list[Message], dict[str, Any]]:
    """Check the layers that `student` (a StudentSettings) keeps against those of a model.

    Args:
        student: the settings.
        config: the Hugging Face config of the model that the step gets, as a dict.

    Returns:
        The errors, each with its setting, and the config of the student.
    """
    if student.is_external:
        return check_external_student(student, config)
    family, result_config = find_family(config), copy.deepcopy(dict(config))
    errors: list[Message] = []
    stacks = {stack.name: stack for stack in family.stacks(config)} if family else {}
    for name in STACK_NAMES if family else ():
        choice, stack = getattr(student, name), stacks.get(name)
        if choice is None:
            continue
        if stack is None:
            hint = did_you_mean(name, stacks)
            kind = config.get("model_type")
            errors.append(
                error_message(
                    "unknown-stack",
                    f"{with_article(kind)} model has no such stack; it has {', '.join(stacks)}.{hint}",
                    setting=name,
                )
            )
            continue
        count = stack.num_layers(config)
        if count is None:
            continue
        if isinstance(choice, int):
            if choice > count:
                text = f"the student cannot keep {choice} of {count} layers. Choose at most {count}."
                errors.append(error_message("more-than-model-has", text, setting=name))
            elif reason := _first_layer_error(family, choice, count, student.layer_selection):
                errors.append(error_message("first-layer-required", reason, setting=name))
            set_config_value(result_config, stack.num_layers_key, choice)
        else:
            if sorted(set(choice)) != choice or not all(0 <= i < count for i in choice):
                text = f"expected increasing layer indices from 0 to {count - 1}, got {choice}."
                errors.append(error_message("wrong-layer-numbers", text, setting=name))
            elif reason := _first_layer_error(family, choice, count, student.layer_selection):
                errors.append(error_message("first-layer-required", reason, setting=name))
            set_config_value(result_config, stack.num_layers_key, len(choice))
    return errors, result_config


def check_losses(settings: DistillSettings, config: Mapping[str, Any]) -> list[Message]:
    """Return the errors, each with its setting, of losses that a student with this config lacks."""
    family, errors = find_family(config), check_layer_map(settings.layer_map, config, None)
    pairs = module_pairs(settings.layer_map)
    errors += check_module_names("student", pairs, config)
    for index, training in enumerate(settings.phase_settings()):
        setting = "losses" if settings.phases is None else f"phases.{index}.losses"
        inner = training.losses.inner_weights()
        if family is None and inner:
            kind = config.get("model_type")
            text = f"{', '.join(inner)} of a {kind} model are not supported. Remove these losses."
            errors.append(error_message("unsupported-family", text, setting=setting))
        is_text_module = family is not None and family.is_user_module and family.input_kind == "texts"
        if is_text_module and inner and not pairs:  # of others the task shows it
            errors.append(error_message("does-not-fit-model", UNNAMED_MODULES, setting=setting))
        stacks = family.stacks(config) if family else ()
        if "attention" in inner and not all(a.uses_attention_interface for s in stacks for a in s.attentions):
            text = no_attention_scores_error(str(config.get("model_type")))
            errors.append(error_message("unreadable-attention", text, setting=f"{setting}.attention"))
        if training.losses.reverse_kl and config.get("problem_type") == REGRESSION:
            errors.append(
                error_message(
                    "problem-type-mismatch",
                    "a regression model has no distribution; use losses: {logits: 1.0} instead.",
                    setting=f"{setting}.reverse_kl",
                )
            )
    return errors


UNNAMED_MODULES = (
    "of models of images or arrays, and of modules of your own, only hidden_states of modules that layer_map"
    " pairs by name are compared, such as layer_map: {network.features.3: network.features.5}. Set it, or"
    " remove the losses on inner states."
)


def inner_loss_errors(settings: DistillSettings, task: Task) -> list[Message]:
    """Return the errors of losses on inner states: only models of text have numbers of layers."""
    traits = task_traits(task)
    by_name, without_text = bool(module_pairs(settings.layer_map)), traits.modality != "text"
    if by_name and not without_text and traits.output != "labels":
        text = (
            f"modules by name are for classifiers and for arrays; the task is {task}. Use numbers of layers."
        )
        return [error_message("does-not-fit-task", text, setting="layer_map")]
    if without_text and not by_name and any(t.losses.inner_weights() for t in settings.phase_settings()):
        setting = "losses" if settings.phases is None else "phases"
        return [error_message("does-not-fit-task", UNNAMED_MODULES, setting=setting)]
    return []


def check_module_names(role: str, names: Iterable[str], config: Mapping[str, Any]) -> list[Message]:
    """Return the errors of names in `layer_map` that a user's module of this config does not have.

    Of other models they are found when it is loaded.
    """
    wanted = [*names]
    if not wanted or not is_user_module(config):
        return []
    from smelt.models.user_module import build_module

    try:
        network = build_module(str(config.get("module")), str(config.get("source_hash")))
    except InputError:
        return []  # the plan reports it
    known = [MODULE_PREFIX, *(f"{MODULE_PREFIX}.{name}" for name, _ in network.named_modules() if name)]
    texts = [unknown_module_error(role, name, known) for name in wanted if name not in known]
    return [error_message("unknown-module", text, setting="layer_map") for text in texts]


def unknown_module_error(role: str, name: str, known: Iterable[str]) -> str:
    """Return the error text for a module that a model lacks. known: the names of those that it has."""
    names = [each for each in known if each]
    parent = name.rpartition(".")[0]
    siblings = [each for each in names if each.rpartition(".")[0] == parent]
    listed = ", ".join((siblings or [each for each in names if each.count(".") <= 1])[:_MAX_LISTED])
    return f"the {role} has no module '{name}'. It has, among others: {listed}.{did_you_mean(name, names)}"


def _planned_label_errors(
    settings: DistillSettings, student: Mapping[str, Any], teacher: Mapping[str, Any]
) -> list[Message]:
    """Return `label_errors` if both models are trained classifiers; an external student has its teacher's."""
    is_compared = len(settings.all_teachers()) == 1 and not settings.replaces_model
    if not is_compared or not (has_classifier(student) and has_classifier(teacher)):
        return []
    return label_errors(student, teacher)


def check_teacher_folders(settings: DistillSettings, config: Mapping[str, Any]) -> list[Message]:
    """Return the errors, each with its setting, of teacher folders that do not fit the model."""
    errors: list[Message] = []
    for teacher in settings.all_teachers():
        teacher_config = {} if isinstance(teacher, str) else _read_config(Path(teacher.model))
        family = find_family(config)
        if family is None or find_family(teacher_config) is None:
            continue  # the plan reports what is wrong with the folder
        if sizes := image_size_difference(teacher_config, config):
            errors.append(error_message("image-size-mismatch", sizes, setting="teacher"))
        names = module_pairs(settings.layer_map).values()
        errors += check_module_names("teacher", names, teacher_config)
        errors += _planned_label_errors(settings, config, teacher_config)
        limit, model_limit = position_limit(teacher_config), position_limit(config)
        max_tokens = (
            min(model_limit, settings.max_length or model_limit)
            if model_limit is not None
            else settings.max_length
        )
        if (
            family.architecture != "decoder"
            and limit is not None
            and max_tokens is not None
            and limit < max_tokens
        ):
            text = (
                f"the teacher has {limit} positions, but samples have up to {max_tokens} tokens; set"
                f" max_length: {limit}."
            )
            errors.append(error_message("longer-than-model", text, setting="teacher"))
    return errors


def _read_config(folder: Path) -> Mapping[str, Any]:
    try:
        return read_json_object(folder / "config.json")
    except (InputError, OSError):
        return {}


def check_teacher(
    settings: DistillSettings, student: Mapping[str, Any], teacher: Mapping[str, Any]
) -> list[Message]:
    """Return the errors, each with its setting, where student and teacher cannot be compared.

    Args:
        settings: of the step.
        student: its Hugging Face config; its own layers have been checked already.
        teacher: the teacher's Hugging Face config.
    """
    inner_losses = [training.losses.inner_weights() for training in settings.phase_settings()]
    errors = _planned_label_errors(settings, student, teacher)
    if not any(inner_losses):
        return errors
    errors += check_layer_map(settings.layer_map, student, teacher)
    errors += check_module_names("teacher", module_pairs(settings.layer_map).values(), teacher)
    student_width, teacher_width = _hidden_size(student), _hidden_size(teacher)
    for index, inner in enumerate(inner_losses):
        if "cosine" in inner and student_width and teacher_width and student_width != teacher_width:
            setting = "losses" if settings.phases is None else f"phases.{index}.losses"
            errors.append(
                error_message(
                    "width-mismatch",
                    cosine_width_error(student_width, teacher_width),
                    setting=f"{setting}.cosine",
                )
            )
    return errors


def check_several_teachers(
    settings: DistillSettings, config: Mapping[str, Any], steps: Mapping[str, Mapping[str, Any]]
) -> list[Message]:
    """Return the errors, each with its setting, where outputs of several classifiers cannot be combined.

    Args:
        settings: of the step.
        config: of the student; an external one has the labels of the step's input.
        steps: the known configs of the steps that are teachers, by setting.
    """
    configs = [
        steps.get(f"teacher.{index}", {}) if isinstance(teacher, str) else _read_config(Path(teacher.model))
        for index, teacher in enumerate(settings.all_teachers())
    ]
    try:
        labels = [planned_labels(teacher) for teacher in configs]
        student_labels = planned_labels(config)
        teachers = [teacher_labels for teacher_labels in labels if teacher_labels is not None]
        if len(teachers) < max(2, len(labels)) or student_labels is None:
            return []  # not known before the run
        if settings.student is not None and settings.student.is_external:
            student_labels = _external_labels(settings.student, teachers, student_labels)
    except InputError as error:
        return [error_message(error.code or DEFAULT_CODE, str(error), setting="teacher")]
    return several_teacher_errors(teachers, student_labels, uses_labels=settings.uses_labels())


def _external_labels(
    student: StudentSettings, teachers: Sequence[ModelLabels], model: ModelLabels
) -> ModelLabels:
    """Return the labels of an external student: its own, or those that it is made with for `teachers`."""
    own_config = read_student_config(student) if student.model else {}
    return planned_labels(own_config) or new_student_labels(teachers, model)


def cosine_width_error(student: int, teacher: int) -> str:
    """Return the error text for the cosine loss of hidden states with different widths."""
    return (
        f"the teacher's hidden states have width {teacher}, the student's {student}; their cosine is not"
        " defined. Use losses: {hidden_states: 1.0} instead, which learns a projection."
    )


def _hidden_size(config: Mapping[str, Any]) -> int | None:
    """Return the width of a model's hidden states, None if its config has none."""
    family = find_family(config)
    return family.hidden_size(config) if family else None


def no_attention_scores_error(family_name: str) -> str:
    """Return the error text for a family whose attention scores cannot be captured."""
    return (
        f"attention scores of a {family_name} model cannot be captured; use self_attention_relations instead."
    )


def _first_layer_error(family: Family | None, choice: int | list[int], count: int, choose: str) -> str | None:
    """Return the error text if a student lacks the first layer and needs it, else None."""
    drops_first = choose == "last" and choice < count if isinstance(choice, int) else 0 not in choice
    if family is None or family.first_layer_reason is None or not drops_first:
        return None
    return f"{with_article(family.name)} student must keep the first layer: {family.first_layer_reason}."


def check_unlabeled(settings: DistillSettings, task: Task, data: Mapping[str, Split]) -> list[Message]:
    """Return the errors, each with its setting, of losses that need labels on unlabeled samples."""
    if settings.train_on == "labeled":
        return []
    if task not in UNLABELED_TASKS:
        tasks = " and ".join(sorted(UNLABELED_TASKS))
        text = f"unlabeled samples are supported for {tasks}, not for {task}; remove train_on."
        return [error_message("does-not-fit-task", text, setting="train_on")]
    errors = []
    origin = data[UNLABELED].origin if UNLABELED in data else f"data: {UNLABELED}"
    for index, training in enumerate(settings.phase_settings()):
        setting = "losses" if settings.phases is None else f"phases.{index}.losses"
        term = "cosent" if task_traits(task).output == "embedding" else "labels"
        weight = (
            training.losses.vector_weights()["cosent"]
            if task_traits(task).output == "embedding"
            else training.losses.labels
        )
        if weight and settings.train_on == "both" and term == "labels":
            if not training.losses.logits and not training.losses.reverse_kl:
                text = f"the samples of {origin} have no labels, and no loss uses the teacher's outputs. Set"
                remedy = "losses: {logits: 1.0}, or train_on: labeled."
                errors.append(
                    error_message("missing-labels", f"{text} {remedy}", setting=f"{setting}.{term}")
                )
            continue
        if weight:
            has_teacher = task_traits(task).output == "embedding" or training.losses.uses_teacher()
            remedy = (
                f"losses: {{{term}: 0}}, which keeps" if has_teacher else "losses: {logits: 1.0}, which is"
            )
            errors.append(
                error_message(
                    "missing-scores" if task_traits(task).output == "embedding" else "missing-labels",
                    f"the weight of this loss is {weight:g}, but the samples of {origin} have no"
                    f" {term}. Set {remedy} the loss on the teacher's outputs.",
                    setting=f"{setting}.{term}",
                )
            )
    return errors
