"""The prompt template of a model for text generation, and whether it fits the samples, before a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from smelt.core.errors import InputError
from smelt.core.messages import Message
from smelt.data.prompt_rows import assistant_turns
from smelt.data.splits import TEXT_GENERATION, Split
from smelt.models.prompt_template import (
    CHAT,
    PROMPT_FIELD,
    PromptTemplate,
    open_prompt_template,
    read_chat_template,
)
from smelt.models.text_rules import TEXT_RULES_FILE, TextRules, read_text_rules
from smelt.pipeline.recipe.recipe import ParsedRecipe


def _tokenizer_folder(recipe: ParsedRecipe, folder: Path) -> Path | None:
    """Return the folder of the tokenizer; None for one that is trained by the run."""
    if isinstance(recipe.model, str):
        return folder
    tokenizer = recipe.model.tokenizer
    return recipe.base / tokenizer if isinstance(tokenizer, str) else None


def prompt_rules(recipe: ParsedRecipe, folder: Path) -> tuple[TextRules, list[str]]:
    """Return the prompt template and its description for the plan.

    It is the recipe's, else the one stored with the model, else the tokenizer's chat template, else
    `{prompt}`.

    Raises:
        InputError: `no-chat-template`, `missing-placeholder`, or the files are damaged.
    """
    wanted, why = recipe.data.prompt_template, "from the recipe"
    home = _tokenizer_folder(recipe, folder)
    if wanted is None:
        wanted, why = read_text_rules(folder).prompt_template, f"from the model's {TEXT_RULES_FILE}"
    known = home is None or home.is_dir()
    if wanted is None and not known:
        raise InputError(
            f"model.tokenizer: {home} is not a local folder, so whether it has a chat template is not known"
            " yet. Set data: {prompt_template: chat}, or to a text with {prompt}.",
            code="missing-setting",
            setting="data.prompt_template",
        )
    if wanted is None:
        chat = None if home is None else read_chat_template(home)
        wanted = PROMPT_FIELD if chat is None else CHAT
        why = "the model has no chat template" if chat is None else "the tokenizer's chat template"
    if wanted != CHAT and PROMPT_FIELD not in wanted:
        raise InputError(
            f"prompt_template: {wanted[:80]!r} has no {PROMPT_FIELD}, which is replaced by each prompt."
            ' Write, for example, "Question: {prompt}\\nAnswer:", or chat.',
            code="missing-placeholder",
            setting="data.prompt_template",
        )
    if wanted == CHAT and known:
        open_prompt_template(home or folder, wanted, {})  # raises where the tokenizer has none
    return TextRules(prompt_template=wanted), [f"prompt template {wanted!r} ({why})"]


def check_prompts(
    recipe: ParsedRecipe, folder: Path, splits: Mapping[str, Split]
) -> list[tuple[str, Message]]:
    """Return (split, mistake) for prompts that do not fit the prompt template, at most one for each split.

    Instructions and conversations need the format that the model was trained with, so they are never passed
    as plain text to a model without a chat template unless the recipe sets the template. One conversation
    of each order of roles is rendered, since templates refuse some orders.
    """
    if recipe.task != TEXT_GENERATION:
        return []
    rules, _ = prompt_rules(recipe, folder)
    home = _tokenizer_folder(recipe, folder) or folder
    if not home.is_dir():  # a tokenizer of the hub
        return []
    recorded = recipe.data.prompt_template or read_text_rules(folder).prompt_template
    template = open_prompt_template(home, rules.prompt_template, {})
    assert template is not None
    found = []
    for name, split in splits.items():
        try:
            if not recorded and not template.is_chat:
                _require_plain_prompts(split)
            _render_examples(template, split)
        except InputError as error:
            found.append((name, error.as_message()))
    return found


def _require_plain_prompts(split: Split) -> None:
    row = next((e for e in split.examples if e.layout in ("instruction", "messages")), None)
    if row is not None:
        raise InputError(
            f"{split.origin}: the samples are {_LAYOUT_TEXTS[row.layout or 'prompt']}, and the model's"
            " tokenizer has no chat template that turns them into its input. Set data: {prompt_template: ...}"
            ' to the text around each prompt in training, for example "{prompt}\\n\\n".',
            code="no-chat-template",
            setting="data.prompt_template",
        )


_LAYOUT_TEXTS = {"instruction": "instructions", "messages": "conversations", "prompt": "prompts"}


def _render_examples(template: PromptTemplate, split: Split) -> None:
    """Render one conversation of each order of roles.

    Raises:
        InputError: the template refuses it; the message has its line.
    """
    seen: set[tuple[str, ...]] = set()
    for at, example in enumerate(split.examples, 1):
        try:
            turn = assistant_turns(example.text, (*example.references, "-")[0])[-1]
            roles = tuple(message["role"] for message in turn)
            if roles not in seen:
                seen.add(roles)
                template.render_response(turn)
        except InputError as error:
            number = example.line or example.row or at
            raise error.with_location(f"{split.origin}:{number}") from error
