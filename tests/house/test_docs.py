"""What the pages say can be done: links lead somewhere, commands and their options exist."""

import functools
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from smelt.evaluate.report.render import render_html
from smelt.stage import Settings
from tools import report_picture, settings_tables

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SKIPPED = {".venv", ".git", "build", "runs", "node_modules", ".pytest_cache"}
PAGES = sorted(
    path for path in ROOT.rglob("*.md") if not SKIPPED & set(path.relative_to(ROOT).parts) and path.is_file()
)
FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", flags=re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")
# Names with capitals are pages of other projects, such as ONNX Runtime's.
PAGE_IN_SOURCE = re.compile(r"(?<![\w/])(docs/[a-z0-9/-]+\.md)(?:#([\w-]+))?")
# Capitals are placeholders, such as NAME.
FOLDERS = "smelt|compress|export|evaluate|tests|tools"
FILE_OR_TEST = re.compile(rf"(?<![\w/.])((?:{FOLDERS})/[a-z0-9_/]+\.py)(?:::(\w+))?")
# the files that docs/dev/technique.md adds
EXAMPLES = {"compress/prune/magnitude.py", "tests/compress/prune/test_magnitude.py"}
SHELLS = {"bash", "sh", "console", "shell"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def command_lines(text: str) -> list[list[str]]:
    """The words of each command in the page's shell blocks; comments and a leading `$` are dropped."""
    lines = []
    for language, block in FENCE.findall(text):
        if language not in SHELLS:
            continue
        for line in block.replace("\\\n", " ").splitlines():
            tokens = shlex.split(line.strip().removeprefix("$ "), comments=True)
            if tokens:
                lines.append(tokens)
    return lines


def smelt_arguments(text: str) -> list[list[str]]:
    """What stands behind `smelt`, `.venv/bin/smelt` or `python -m smelt` in the page's commands."""
    argument_lists = []
    for tokens in command_lines(text):
        if Path(tokens[0]).name == "smelt":
            argument_lists.append(tokens[1:])
        elif tokens[1:3] == ["-m", "smelt"]:
            argument_lists.append(tokens[3:])
    return argument_lists


def check_command(arguments: list[str]) -> None:
    """Read `arguments` as the command line would, without doing anything.

    Raises:
        click.UsageError: no such command or option, or more words than it takes.
    """
    from smelt.cli.main import main

    command: click.Command = main
    context = click.Context(command, info_name="smelt")
    while isinstance(command, click.Group):
        _, rest, _ = command.make_parser(context).parse_args(args=list(arguments))
        if not rest:
            return
        name, subcommand, arguments = command.resolve_command(context, list(rest))
        assert subcommand is not None
        command = subcommand
        context = click.Context(command, info_name=name, parent=context)
    _, remaining, _ = command.make_parser(context).parse_args(args=list(arguments))
    if remaining and not context.allow_extra_args:
        raise click.UsageError(f"'{context.command_path}' does not take the words {remaining}.")


def relative_links(text: str) -> Iterator[str]:
    prose = FENCE.sub("", text)
    for target in LINK.findall(prose):
        if not re.match(r"[a-z]+:|#", target):
            yield target.split("#")[0]


@functools.cache
def anchors(text: str) -> set[str]:
    """The places of a page that a link may name: its headings, as GitHub spells them."""
    counts: dict[str, int] = {}
    for heading in re.findall(r"^#+ +(.*)$", FENCE.sub("", text), flags=re.M):
        slug = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", slug).replace(" ", "-")
        counts[name] = counts.get(name, -1) + 1
    return {
        name if not number else f"{name}-{number}"
        for name, count in counts.items()
        for number in range(count + 1)
    }


def anchored_links(text: str, page: Path) -> Iterator[tuple[Path, str]]:
    """Pages and places in them that a page links to."""
    for target in LINK.findall(FENCE.sub("", text)):
        path, mark, anchor = target.partition("#")
        if mark and not re.match(r"[a-z]+:", target):
            yield ((page.parent / path).resolve() if path else page), anchor


def recipes(page: Path) -> list[str]:
    """The YAML blocks of a page that are whole recipes."""
    blocks = [
        block for language, block in FENCE.findall(page.read_text(encoding="utf-8")) if language == "yaml"
    ]
    return [block for block in blocks if re.search(r"^model:", block, flags=re.M) and "\nstages:" in block]


RECIPES = [(page, number) for page in PAGES for number in range(len(recipes(page)))]
PAGES_WITH_COMMANDS = [page for page in PAGES if smelt_arguments(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=name_of)
def test_smelt_commands_exist(page: Path) -> None:
    for arguments in smelt_arguments(page.read_text(encoding="utf-8")):
        try:
            check_command(arguments)
        except click.UsageError as error:
            pytest.fail(f"smelt {shlex.join(arguments)}: {error.format_message()}")


@pytest.mark.parametrize(("page", "number"), RECIPES, ids=[f"{name_of(p)}-{n}" for p, n in RECIPES])
def test_recipe_in_page_is_valid(page: Path, number: int, tmp_path: Path) -> None:
    from smelt.pipeline.recipe.stages import load_stage
    from tests.support.parsed_recipes import parse_recipe

    recipe = parse_recipe(recipes(page)[number], tmp_path / "recipe.yaml")
    assert len(recipe.stages) > 1
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    for stage_entry in recipe.stages:
        settings_type = load_stage(stage_entry.stage).settings_type
        settings = settings_type.model_validate_json(json.dumps(stage_entry.settings), strict=True)
        for package in settings.required_packages():
            [extra] = (
                name for name, needs in extras.items() if name != "dev" and needs[0].startswith(package)
            )
            assert f"smelt[{extra}]" in page.read_text(encoding="utf-8"), f"the page does not name {extra}"


def test_install_page_names_all_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs/start/install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\|`([a-z0-9-]+)`\|", page, flags=re.M)) == set(
        project["optional-dependencies"]
    ) - {"dev"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    text = page.read_text(encoding="utf-8")
    targets_used = {tokens[1] for tokens in command_lines(text) if tokens[0] == "make" and len(tokens) > 1}
    targets_used |= set(re.findall(r"`make ([a-z]+)`", text))
    assert targets_used - targets == set()


@pytest.mark.parametrize("page", [ROOT / "Makefile", *PAGES], ids=name_of)
def test_named_files_and_tests_exist(page: Path) -> None:
    named = FILE_OR_TEST.findall(page.read_text(encoding="utf-8"))
    assert [(path, test) for path, test in named if path not in EXAMPLES and not exists(path, test)] == []


def exists(path: str, test: str) -> bool:
    """Whether a file exists and, where `test` is not empty, has a test of this name."""
    file = ROOT / path
    return file.is_file() and (not test or f"def {test}(" in file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [link for link in relative_links(text) if link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_headings_exist(page: Path) -> None:
    anchors_by_path = {path: anchors(path.read_text(encoding="utf-8")) for path in PAGES}
    links = anchored_links(page.read_text(encoding="utf-8"), page)
    assert [(name_of(to), anchor) for to, anchor in links if anchor not in anchors_by_path.get(to, ())] == []


def test_pages_and_headings_named_in_sources_exist() -> None:
    sources = [
        path for ending in ("py", "yaml", "txt") for path in ROOT.rglob(f"*.{ending}")
        if not SKIPPED & set(path.relative_to(ROOT).parts)
    ]  # fmt: skip
    references = {
        reference
        for path in sources
        for reference in PAGE_IN_SOURCE.findall(path.read_text(encoding="utf-8"))
    }
    assert {anchor for _, anchor in references} > {""}
    assert [page for page, _ in references if not (ROOT / page).is_file()] == []
    assert [
        (page, anchor_name)
        for page, anchor_name in references
        if anchor_name and anchor_name not in anchors((ROOT / page).read_text("utf-8"))
    ] == []


def test_doc_indexes_list_every_page() -> None:
    indexes = [DOCS / "README.md", DOCS / "measurements" / "README.md"]
    linked = {
        (index.parent / link).resolve() for index in indexes
        for link in relative_links(index.read_text(encoding="utf-8"))
    }  # fmt: skip
    assert set(DOCS.rglob("*.md")) - linked == {DOCS / "README.md"}


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=name_of)
def test_settings_tables_are_up_to_date(page: Path) -> None:
    stale = settings_tables.fill(page) != page.read_text(encoding="utf-8")
    assert not stale, f"{name_of(page)}: a settings table is not up to date. Run make docs."


def test_every_settings_class_has_table() -> None:
    assert set(settings_tables.places()) == set(settings_tables.TABLES)
    documented = {model for name in settings_tables.TABLES for _, _, model in settings_tables.rows(name)}
    models = {model for model in all_settings(Settings) if model.__module__.startswith("smelt.")}
    bases = {base for model in models for base in model.__bases__}
    with_other_defaults = {model for model in models if documented & set(model.__bases__)}
    assert models - documented - bases - with_other_defaults == set()


def all_settings(base: type[Settings]) -> Iterator[type[Settings]]:
    for model in base.__subclasses__():
        yield model
        yield from all_settings(model)


def test_picture_in_readme_shows_todays_report() -> None:
    page = render_html(report_picture.read_report())
    assert report_picture.pictured_digest() == report_picture.page_digest(page), "Run make docs."
