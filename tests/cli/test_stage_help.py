"""What `smelt stages` prints: within 80 columns, in a recipe's words."""

from typing import Annotated, Literal

import pytest
from pydantic import Field
from ruamel.yaml import YAML

from smelt.cli.stage_help import _settings_lines, describe_stage
from smelt.core.errors import InputError
from smelt.pipeline.recipe.stages import STAGE_CLASSES, load_stage
from smelt.quantization.schemes.registry import SCHEMES, bits_per_weight, default_options, supported_targets
from smelt.stage import Settings, StepName
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick


class _Inner(Settings):
    """An inner mapping."""

    part: float = Field(default=0.5, description="a part")


class _Outer(Settings):
    """All kinds of settings."""

    name: str
    teacher: StepName = "model"
    kinds: list[Literal["heads", "ffn"]] = Field(default=["heads"], description="which")
    layers: int | list[int] | None = None
    sure: bool = True
    inner: _Inner | None = None
    share: Annotated[float, Field(ge=0)] = 0.1


def test_settings_are_printed_in_recipe_syntax() -> None:
    assert _settings_lines(_Outer, "") == [
        "name: string (required)",
        "teacher: string (default model)",
        'kinds: list of heads | ffn (default ["heads"]) which',
        "layers: integer | list of integer (default none)",
        "sure: boolean (default true)",
        "inner:",
        "  part: number (default 0.5) a part",
        "share: number (default 0.1)",
    ]


@pytest.mark.parametrize("stage_name", STAGE_CLASSES)
def test_each_stage_is_explained_within_80_columns(stage_name: str) -> None:
    text = describe_stage(stage_name)
    assert text.startswith(f"{stage_name}: ")
    for line in text.splitlines():
        assert len(line) <= 80, line
    for internal_name in ("typing.", "smelt.", "Literal[", "NoneType", "PydanticUndefined"):
        assert internal_name not in text


@pytest.mark.parametrize("stage_name", STAGE_CLASSES)
def test_each_example_is_valid_recipe_step(stage_name: str) -> None:
    paragraphs = describe_stage(stage_name).split("\n\n")
    [examples] = [text for text in paragraphs if text.startswith("    - ")]
    steps = YAML(typ="safe").load(examples)
    assert stage_name in {key for step in steps for key in step}
    for step in steps:
        [(stage, settings)] = [pair for pair in step.items() if pair[0] in STAGE_CLASSES]
        load_stage(stage).settings_type.model_validate(settings)


def rows_of_the_table() -> dict[str, list[str]]:
    """Return the cells of each scheme, what is wrapped put together again."""
    head, *lines = describe_stage("quantize").partition("\n  scheme ")[2].partition("\n\n")[0].splitlines()
    starts = [
        0,
        *(
            (f"  scheme {head}").index(heading)
            for heading in ("bits", "data", "training", "runtimes", "pays")
        ),
    ]
    table: dict[str, list[str]] = {}
    name = ""
    for line in lines:
        cells = [line[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True)]
        if cells[0]:
            name, table[cells[0]] = cells[0], cells[1:]
        else:
            table[name] = [
                f"{cell} {continuation}".strip()
                for cell, continuation in zip(table[name], cells[1:], strict=True)
            ]
    return table


def test_scheme_table_has_row_for_each_scheme() -> None:
    rows = rows_of_the_table()
    assert list(rows) == list(SCHEMES)
    for name, (bits, data, training, runtimes, pays) in rows.items():
        scheme = SCHEMES[name]
        assert bits == f"{bits_per_weight(scheme, default_options(scheme)):.3g}"
        assert (data != "none") == scheme.requires_calibration
        assert (training != "none") == scheme.requires_training
        targets = supported_targets([scheme])
        assert runtimes.split(", ") == targets if targets else "torch" in runtimes
        assert pays == scheme.recommended_for


def test_scheme_table_notes_options_for_int4_in_tensorrt() -> None:
    text = " ".join(describe_stage("quantize").split())
    sentence = next(
        candidate
        for candidate in text.split(". ")
        if "int4" in candidate and "tensorrt" in candidate and "accuracy_level" in candidate
    )
    assert all(value in sentence for value in ("64 or 128", "symmetric: positive", "accuracy_level: 0"))


@pytest.mark.parametrize("name", SCHEMES)
def test_each_scheme_is_explained_with_its_requirements(name: str) -> None:
    scheme, text = SCHEMES[name], " ".join(describe_stage("quantize").split())
    assert f"{name}: {scheme.summary}" in text
    assert scheme.recommended_for
    summary = text.partition(f"{name}: {scheme.summary}")[2].partition(" or later.")[0].partition(". ")[0]
    assert ("embedding_scheme" in summary) == bool(scheme.embedding_scheme)
    assert (scheme.embedding_scheme or "") in summary
    assert scheme.embedding_scheme or scheme.supports_embeddings
    assert all(
        f"needs the package {package} {oldest}" in summary for package, oldest in scheme.packages.items()
    )
    assert ("needs the package" in summary) == bool(scheme.packages)


def test_unknown_stage_suggests_nearest() -> None:
    with raises_code("unknown-stage", InputError) as excinfo:
        describe_stage("prnue")
    assert "'prune'?" in str(excinfo.value)


def test_setting_with_scalar_and_mapping_form_shows_both() -> None:
    text = describe_stage("onnx")
    assert "\n  autotune: boolean | mapping (default false) " in text
    assert "\n    num_beams: integer (optional) " in text


def test_list_of_mappings_shows_fields_of_item() -> None:
    text = describe_stage("distill")
    assert "\n  phases: list of mapping (default none)" in text
    inside = text[text.index("phases: list") :]
    assert "\n      sentence_embedding: number (default none) " in inside


@pytest.mark.parametrize(("stage", "words"), [
    ("trim-vocabulary", "default 1"), ("sparsify", "default 0.5 without pattern"),
    ("factorize", "default 0.95 if no other size is set"), ("drop-layers", "default 0.5"),
])  # fmt: skip
def test_default_for_several_unset_settings_is_explained(stage: str, words: str) -> None:
    assert words in " ".join(describe_stage(stage).split())
