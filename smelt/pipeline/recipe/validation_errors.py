"""Collect the errors of a recipe with their lines, and write their messages.

pydantic checks the settings; its errors are translated here into messages with the expected value (from
the JSON schema of the settings) and the value in the recipe. Names of stages, settings and values in other
tools get a hint.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic_core import ErrorDetails

from smelt.core.errors import SettingError, SmeltError, combined_error, did_you_mean
from smelt.core.messages import Message
from smelt.pipeline.recipe.yaml_file import KeyPath, YamlDocument

# Names of settings in other tools. The first one that the stage has is suggested.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "actorder": ("act_order",),
    "alpha": ("losses", "smoothquant_alpha", "asvd_alpha"),
    "amount": ("keep_ratio", "sparsity"),
    "beams": ("num_beams",),
    "bf16": ("precision",),
    "bits": ("scheme", "bit_widths", "target_bits"),
    "bits_per_weight": ("target_bits",),
    "block_size": ("group_size",),
    "builder_optimization_level": ("optimization_level",),
    "clip_grad_norm": ("max_grad_norm",),
    "desc_act": ("act_order",),
    "dtype": ("precision", "scheme"),
    "ema": ("ema_decay",),
    "eval_steps": ("num_evals",),
    "eval_strategy": ("num_evals",),
    "fp16": ("precision",),
    "gradient_clipping": ("max_grad_norm",),
    "ignore": ("exclude",),
    "ignored_scope": ("exclude",),
    "iters": ("iterations",),
    "keep_io_types": ("keep_fp32",),
    "label_smoothing": ("label_smoothing_factor",),
    "length": ("sequence_length",),
    "lora_alpha": ("alpha", "lora"),
    "lr": ("learning_rate",),
    "lr_schedule": ("lr_scheduler_type",),
    "mask_structure": ("pattern",),
    "masks": ("learned_masks",),
    "max_eval_samples": ("max_validation_samples",),
    "max_seq_len": ("max_length",),
    "max_seq_length": ("max_length",),
    "max_source_length": ("max_length",),
    "max_train_steps": ("max_steps",),
    "max_workspace_size": ("workspace_mib",),
    "method": ("calibration_method",),
    "model_max_length": ("max_length",),
    "nodes_to_exclude": ("exclude",),
    "nsamples": ("calibration_samples",),
    "num_calibration_samples": ("calibration_samples",),
    "num_hidden_layers": ("layers",),
    "num_samples": ("calibration_samples",),
    "num_train_epochs": ("epochs",),
    "observer": ("clip", "calibration_method"),
    "op_types_to_quantize": ("op_types",),
    "opset_version": ("opset",),
    "optim": ("optimizer",),
    "patience": ("early_stopping_patience",),
    "per_channel": ("granularity",),
    "per_device_train_batch_size": ("batch_size",),
    "percentile": ("calibration_percentile",),
    "pruning_ratio": ("keep_ratio", "sparsity"),
    "q_group_size": ("group_size",),
    "r": ("lora", "low_rank_correction"),
    "rank": ("r", "keep_ratio", "energy"),
    "ratio": ("keep_ratio", "sparsity", "energy"),
    "save_steps": ("checkpoint_interval_minutes",),
    "schedule": ("lr_scheduler_type",),
    "scheduler": ("lr_scheduler_type",),
    "skip": ("exclude",),
    "smoothing_strength": ("smoothquant_alpha",),
    "sparsity": ("keep_ratio",),
    "student_model": ("student",),
    "subset_size": ("calibration_samples",),
    "sym": ("symmetric",),
    "target_modules": ("targets", "lora"),
    "target_opset": ("opset",),
    "target_sparsity": ("sparsity", "keep_ratio"),
    "teacher_model": ("teacher",),
    "teacher_name_or_path": ("teacher",),
    "tokens_per_batch": ("max_tokens_per_batch",),
    "w_bit": ("scheme",),
    "warmup": ("warmup_steps",),
    "warmup_ratio": ("warmup_steps",),
    "wbits": ("scheme",),
    "weight_bits": ("scheme",),
}


def other_name_hint(name: str, known: Collection[str]) -> str:
    """Return a hint such as " 'lr' is called 'learning_rate'.", or an empty string."""
    smelt_name = next((smelt_name for smelt_name in OTHER_NAMES.get(name, ()) if smelt_name in known), None)
    note = " (the fraction to keep, not to remove)" if smelt_name == "keep_ratio" else ""
    return f" '{name}' is called '{smelt_name}'{note}." if smelt_name else ""


_LAST_LINE = 2**31  # sorts after all lines
ModelT = TypeVar("ModelT", bound=BaseModel)
Schema = Mapping[str, Any]
_FULL_ERROR_TYPES = ("missing", "extra_forbidden", "value_error", "assertion_error")

# The path of a value in the recipe, and the message about it. Warnings and notes have the path ().
Finding = tuple[KeyPath, Message]


def error_findings(path: KeyPath, error: SmeltError) -> Iterator[Finding]:
    """Yield the messages of `error` about the value at `path`."""
    for message in error.messages or (error.as_message(),):
        yield path, message


class RecipeErrors:
    """Collects all errors of one recipe, to report them together.

    overridden: path of each value that comes from the command line -> text of its `--set`.
    """

    def __init__(self, document: YamlDocument) -> None:
        self.document = document
        self.overridden: dict[KeyPath, str] = {}
        self._entries: list[tuple[int, Message]] = []
        for path, message, line, code in document.errors:
            self.add(path, message, line=line, code=code)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, path: KeyPath, message: str, line: int | None = None, *, code: str) -> None:
        """Add `message` about the value at `path`, which also determines the line.

        code: of the error; the same as in the error that a stage raises for it during a run.
        """
        source = self._override_at(path)
        if line is None and source is None and path in self.document.replaced_paths:
            return  # the value was replaced, which has been reported already
        line = line or self.line_of(path)
        start = f"--set {source}" if source else ""
        text = ": ".join(segment for segment in (start, dotted_path(path), message) if segment)
        location: dict[str, Any] = {} if source else {"file": self.document.name, "line": line}
        entry = Message(
            code=code, severity="error", message=text, setting=dotted_path(path) or None, **location
        )
        if (line, entry) not in self._entries:
            self._entries.append((line, entry))

    def add_message(self, path: KeyPath, message: Message) -> None:
        """Add the message `message` about the value at `path`."""
        self.add(path, str(message), code=message.code)

    def add_error(self, path: KeyPath, error: SmeltError) -> None:
        """Add the messages of `error` about the value at `path`."""
        for message in error.messages or (error.as_message(),):
            self.add_message(path, message)

    def add_found(self, messages: Iterable[Message]) -> None:
        """Add messages as they are, in the order of their lines."""
        for entry in ((message.line or _LAST_LINE, message) for message in messages):
            if entry not in self._entries:
                self._entries.append(entry)

    def add_for_option(self, text: str, code: str, option: str) -> None:
        """Add an error in `option` of the command line, which has no line in the file."""
        message = text if text.startswith(option) else f"{option}: {text}"
        entry = Message(code=code, severity="error", message=message, setting=option)
        self._entries.append((_LAST_LINE, entry))

    def line_of(self, path: KeyPath) -> int:
        """Return the line of `path`, or of its nearest parent that is in the file."""
        lines = self.document.lines
        return next((lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in lines), 1)

    def raise_if_any(self) -> None:
        """Raise all errors as one error, in the order of their lines.

        Raises:
            InputError: there is at least one error.
        """
        if self._entries:
            raise combined_error(error for _, error in sorted(self._entries, key=lambda pair: pair[0]))

    def _override_at(self, path: KeyPath) -> str | None:
        overrides = (self.overridden.get(path[:n]) for n in range(len(path), 0, -1))
        return next((text for text in overrides if text), None)


def dotted_path(path: KeyPath) -> str:
    """Return ``stages[1].prune.keep_ratio`` for ("stages", 1, "prune", "keep_ratio")."""
    out = ""
    for key in path:
        out += f"[{key}]" if isinstance(key, int) else f".{key}" if out else key
    return out


def value_text(value: Any) -> str:
    """Return `value` as text for a message: strings in quotes, long values truncated."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def validate_settings(
    model: type[ModelT],
    value: Any,
    path: KeyPath,
    errors: RecipeErrors,
    stand_ins: Mapping[str, Any] | None = None,
) -> tuple[ModelT | None, set[KeyPath]]:
    """Validate `value` as settings of type `model` and add every error to `errors`.

    Validation is strict: a string is not a number, 1 is not true. In JSON, pydantic accepts a list for a
    tuple.

    Args:
        model: class of the settings.
        value: value in the recipe.
        path: its path in the recipe.
        errors: receives the errors.
        stand_ins: replacements for required keys that are missing or invalid.

    Returns:
        The settings, with defaults (or `stand_ins`) for invalid parts so that the rest can be checked in the
        same pass, or None if that is not possible; and the invalid paths below `path`.
    """
    if not isinstance(value, dict):
        errors.add(
            path,
            f"expected {_mapping_text(model.model_fields)}, got {value_text(value)}.",
            code="wrong-value",
        )
        return None, {()}
    invalid_paths, remaining = set[KeyPath](), value
    while True:
        try:
            return model.model_validate_json(json.dumps(remaining), strict=True), invalid_paths
        except ValidationError as error:
            problems = list(_error_messages(error, remaining, _json_schema(model)))
        for location, message, code in () if invalid_paths else problems:
            errors.add((*path, *location), message, code=code)
        removed_paths = {_removable_path(remaining, location) for location, _, _ in problems}
        if removed_paths <= invalid_paths or () in removed_paths:
            return None, invalid_paths | {()}
        invalid_paths |= {location for location, _, _ in problems} | removed_paths
        remaining = _drop_paths(remaining, removed_paths, stand_ins or {})


def _removable_path(value: Any, where: KeyPath) -> KeyPath:
    """Return the smallest part at or around `where` that can be removed to make `value` valid."""
    for number, step in enumerate(where):
        if isinstance(step, int) or not isinstance(value, dict):
            return where[:number]  # a list is removed as a whole
        if step not in value:
            return where[: number + 1] if number == 0 else where[:number]
        value = value[step]
    return where


def _drop_paths(
    value: dict[str, Any], paths: set[KeyPath], placeholders: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `value` without the parts at `paths`; keys in `placeholders` get their placeholder."""
    out = dict(value)
    for key, subpaths in {
        dropped_path[0]: {p[1:] for p in paths if p[0] == dropped_path[0]} for dropped_path in paths
    }.items():
        name = str(key)
        if () not in subpaths and isinstance(out.get(name), dict):
            out[name] = _drop_paths(out[name], subpaths, {})
        elif name in placeholders:
            out[name] = placeholders[name]
        else:
            out.pop(name, None)
    return out


def has_error(invalid_paths: Collection[str], *paths: str) -> bool:
    """Return whether one of the dotted `paths`, a parent or a child of it, is in `invalid_paths`."""
    return any(
        invalid_path == dotted
        or invalid_path.startswith((f"{dotted}.", f"{dotted}["))
        or dotted.startswith(f"{invalid_path}.")
        for invalid_path in invalid_paths
        for dotted in paths
    )


def _error_messages(
    error: ValidationError, value: Any, schema: Schema | None
) -> Iterator[tuple[KeyPath, str, str]]:
    # a union yields one error per member, all about the same value; the message lists the members together
    reported: set[tuple[KeyPath, str]] = set()
    located_errors = [(*_error_location(detail, value), detail) for detail in error.errors(include_url=False)]
    error_paths = {error_path for error_path, _, _ in located_errors}
    empty = {error_path for error_path, _, detail in located_errors if detail["type"] == "string_too_short"}
    for error_path, found_value, detail in located_errors:
        # if one member of a union fits except for a nested value, the errors of the other members are noise
        if detail["type"] not in _FULL_ERROR_TYPES and any(
            p[: len(error_path)] == error_path != p for p in error_paths
        ):
            continue
        subschema = _schema_at(schema, error_path) if schema else None
        kind = detail["type"]
        if error_path in empty and kind != "string_too_short":
            continue
        if kind == "extra_forbidden":
            siblings = functools.reduce(lambda parent, name: parent[name], error_path[:-1], value)
            keys = _known_keys(_schema_at(schema, error_path[:-1]) if schema else None, schema, siblings)
            key = str(error_path[-1])
            code = "unknown-setting"
            message = f"unknown setting. Known here: {', '.join(keys) or 'none'}.{did_you_mean(key, keys)}"
            if renamed := other_name_hint(key, keys):
                message = f"unknown setting.{renamed}"
        elif kind == "missing":
            expected_schema = _expected_text(subschema, schema) if subschema else ""
            code = "missing-setting"
            message = f"missing. Expected {expected_schema}." if expected_schema else "missing."
        elif kind == "string_too_short":
            code = "empty-text"
            message = f"expected a non-empty string, got {value_text(found_value)}."
        elif kind in ("value_error", "assertion_error"):
            cause = detail["ctx"]["error"]
            code = cause.code if isinstance(cause, SettingError) else "wrong-setting"
            message = f"{str(cause).rstrip('.')}."
        else:
            expected = _expected_text(subschema, schema) if subschema else ""
            expected = expected or detail["msg"].removeprefix("Input should be ")
            expected += _unit_text(error_path)
            string_values = [w for w in _allowed_values(subschema, schema) if isinstance(w, str)]
            hint = did_you_mean(found_value, string_values) if isinstance(found_value, str) else ""
            code = "wrong-value"
            message = f"expected {expected}, got {value_text(found_value)}.{hint}"
        if (error_path, message) not in reported:
            reported.add((error_path, message))
            yield error_path, message, code


def _error_location(detail: ErrorDetails, value: Any) -> tuple[KeyPath, Any]:
    """Return the path of an error without pydantic's names of union members, and the value at that path."""
    path: list[str | int] = []
    last = len(detail["loc"]) - 1
    for number, key in enumerate(detail["loc"]):
        is_contained = (isinstance(value, dict) and key in value) or (
            isinstance(value, list) and isinstance(key, int) and 0 <= key < len(value)
        )
        if is_contained:
            value = value[key]
        if is_contained or (number == last and detail["type"] == "missing"):
            path.append(key)
    return tuple(path), value


@functools.lru_cache(maxsize=256)  # creating a schema takes longer than all other checks of a recipe
def _json_schema(model: type[BaseModel]) -> Schema | None:
    try:
        return TypeAdapter(model).json_schema()
    except PydanticInvalidForJsonSchema:
        return None


def _resolve_ref(part: Schema, root: Schema | None) -> Schema:
    while "$ref" in part and root is not None:
        part = root["$defs"][str(part["$ref"]).rsplit("/", 1)[-1]]
    return part


def _union_members(part: Schema | None, root: Schema | None) -> list[Schema]:
    """Return the members of a union without null, or `[part]`."""
    if part is None:
        return []
    part = _resolve_ref(part, root)
    union = part.get("anyOf") or part.get("oneOf")
    if not union:
        return [part]
    return [b for member in union for b in _union_members(member, root) if b.get("type") != "null"]


def _schema_at(root: Schema, path: KeyPath) -> Schema | None:
    """Return the schema of the value at `path`, or None if unknown."""
    schema: Schema = root
    for step in path:
        for member in _union_members(schema, root):
            prefix_items = member.get("prefixItems", [])
            if isinstance(step, int):
                item_schema = prefix_items[step] if step < len(prefix_items) else member.get("items")
            else:
                item_schema = member.get("properties", {}).get(step, member.get("additionalProperties"))
            if isinstance(item_schema, Mapping):
                schema = item_schema
                break
        else:
            return None
    return schema


def _known_keys(part: Schema | None, root: Schema | None, siblings: Collection[str]) -> list[str]:
    """Return the keys of the members of a union that have most of the keys `siblings`."""
    members = [list(member.get("properties", {})) for member in _union_members(part, root)]
    counts = [len({*member_keys}.intersection(siblings)) for member_keys in members]
    best = [keys for keys, count in zip(members, counts, strict=True) if count == max(counts)]
    return list(dict.fromkeys(name for keys in best for name in keys))


def _allowed_values(part: Schema | None, root: Schema | None) -> list[Any]:
    out: list[Any] = []
    for member in _union_members(part, root):
        out += member.get("enum", []) + ([member["const"]] if "const" in member else [])
    return out


def _expected_text(part: Schema | None, root: Schema | None) -> str:
    return " or ".join(
        dict.fromkeys(filter(None, (_schema_text(b, root) for b in _union_members(part, root))))
    )


def _schema_text(part: Schema, root: Schema | None) -> str:
    if "const" in part:
        return value_text(part["const"])
    if "enum" in part:
        return f"one of {', '.join(value_text(v) for v in part['enum'])}"
    kind = part.get("type")
    if kind in ("integer", "number"):
        return f"{'an integer' if kind == 'integer' else 'a number'}{_bounds_text(part)}"
    if kind == "array":
        inner = _expected_text(part.get("items"), root)
        min_text = f" of at least {part['minItems']}" if part.get("minItems") else ""
        return f"a list{min_text}{f' (each {inner})' if inner else ''}"
    if kind == "object":
        return _mapping_text(part.get("properties", {}))
    return {"string": "a string", "boolean": "true or false"}.get(str(kind), "")


def _unit_text(path: KeyPath) -> str:
    """Return " of bytes" for a limit of a size, which many write as text, such as 8MB."""
    is_size = path[-2:-1] in (("size_bytes",), ("size",)) and path[-1] in ("min", "max")
    return " of bytes" if is_size else ""


def _bounds_text(part: Schema) -> str:
    inclusive_min, inclusive_max = part.get("minimum"), part.get("maximum")
    exclusive_min, exclusive_max = part.get("exclusiveMinimum"), part.get("exclusiveMaximum")
    floor, ceiling = (
        inclusive_min if inclusive_min is not None else exclusive_min,
        inclusive_max if inclusive_max is not None else exclusive_max,
    )
    if floor is not None and ceiling is not None:
        edges = [f"{edge:.10g} excluded" for edge in (exclusive_min, exclusive_max) if edge is not None]
        return f" between {floor:.10g} and {ceiling:.10g}" + (f" ({', '.join(edges)})" if edges else "")
    if floor is not None:
        return f" above {floor:.10g}" if inclusive_min is None else f" of at least {floor:.10g}"
    if ceiling is not None:
        return f" below {ceiling:.10g}" if inclusive_max is None else f" of at most {ceiling:.10g}"
    return ""


def _mapping_text(names: Mapping[str, Any]) -> str:
    return f"a mapping with {', '.join(names)}" if names else "a mapping"
