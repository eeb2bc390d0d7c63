"""Samples of text generation: tokens, labels on responses only, truncation, several turns."""

import json

import pytest
import torch

from smelt.core.messages import message_codes
from smelt.data.splits import Example, Split
from smelt.generation.prompt_batches import EncodedResponse, encode_responses, fit_response
from smelt.models.checkpoint import load_tokenizer, write_text_rules
from smelt.models.text_rules import TextRules
from smelt.models.tokenizer import encode_prompts
from smelt.tasks.encode_split import encode_split
from smelt.tasks.samples import IGNORE_INDEX, collate
from tests.support import harness
from tests.support.models import causal, chat_templates

TALK = [{"role": "user", "content": "The cat"}, {"role": "assistant", "content": "sleeps"}]
LONGER = [*TALK, {"role": "user", "content": "The river"}]


@pytest.fixture
def tokenizer(tmp_path):
    def make(template, chat=None, begin=False):
        folder = tmp_path / "m"
        folder.mkdir()
        trained = causal.write_tokenizer(folder, begin)
        if chat:
            trained.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
            trained.chat_template = chat
            trained.save_pretrained(folder)
        rules = TextRules(prompt_template=template)
        if chat:  # the model's files are not needed
            (folder / "text.json").write_text(rules.model_dump_json(exclude_defaults=True))
        else:
            write_text_rules(folder, rules)
        return load_tokenizer(folder)

    return make


def _plain(words, text):
    return words(text, add_special_tokens=False)["input_ids"]


def test_plain_prompt_is_followed_by_response_and_end(tokenizer):
    words = tokenizer("Q: {prompt}\nA:", begin=True)
    [[sample]] = encode_responses([("The cat", " sleeps")], words, every_turn=True)
    prompt = words("Q: The cat\nA:")["input_ids"]
    assert prompt[0] == words.bos_token_id
    assert sample.ids == [*prompt, *_plain(words, " sleeps"), words.eos_token_id]
    assert sample.is_target == [False] * len(prompt) + [True] * (len(sample.ids) - len(prompt))
    assert encode_prompts(["The cat"], words, 10**6) == [prompt]


def test_chat_tokens_equal_transformers(tokenizer):
    text_tokenizer = tokenizer("chat", chat_templates.CHATML)
    [[sample]] = encode_responses([("The cat", "sleeps")], text_tokenizer, every_turn=True)
    prompt = text_tokenizer.apply_chat_template(TALK[:1], add_generation_prompt=True, return_dict=False)
    full_ids = text_tokenizer.apply_chat_template(TALK, return_dict=False)
    assert sample.ids == full_ids[: len(sample.ids)]
    assert sample.ids[-1] == text_tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert sample.num_last_targets == len(sample.ids) - len(prompt)
    assert encode_prompts([json.dumps(TALK[:1])], text_tokenizer, 10**6) == [prompt]


def _decode_targets(words, sample):
    return words.decode([i for i, target in zip(sample.ids, sample.is_target, strict=True) if target])


@pytest.mark.parametrize("choice", ["end", "im", "i", ">", "yes", " cat"])
@pytest.mark.parametrize("template", ["CHATML", "OPENED_THINKING", "LLAMA2"])
def test_targets_of_chat_choice_are_its_own_tokens(tokenizer, template, choice):
    words = tokenizer("chat", getattr(chat_templates, template))
    [[sample]] = encode_responses([("The cat", choice)], words, every_turn=False, with_end=False)
    [[trained]] = encode_responses([("The cat", choice)], words, every_turn=False)
    scored, learned = _decode_targets(words, sample), _decode_targets(words, trained)
    if template == "LLAMA2":  # writes " choice </s>", whose first space may be a part of the choice's token
        assert (scored.lstrip(), learned) == (choice.strip(), f" {choice.strip()} <|endoftext|>")
    else:
        assert (scored, learned) == (choice, f"{choice}<|im_end|>")


@pytest.mark.parametrize("with_end", [True, False])
def test_response_continues_prompt_with_metaspace_tokenizer(tmp_path, with_end):
    text_tokenizer = causal.write_metaspace_tokenizer(tmp_path)
    (tmp_path / "text.json").write_text('{"prompt_template": "Q: {prompt} A:"}')
    text_tokenizer = load_tokenizer(tmp_path)
    [[sample]] = encode_responses(
        [("The cat", " sleeps")], text_tokenizer, every_turn=True, with_end=with_end
    )
    joint = text_tokenizer("Q: The cat A: sleeps")["input_ids"]
    assert sample.ids == joint + ([text_tokenizer.eos_token_id] if with_end else [])
    assert sample.ids[: -sample.num_last_targets] == text_tokenizer("Q: The cat A:")["input_ids"]


def test_prompt_tokens_merged_with_choice_are_scored(tokenizer):
    words = tokenizer("{prompt}")
    [[sample]] = encode_responses([("The hou", "se stands")], words, every_turn=False, with_end=False)
    assert sample.ids == _plain(words, "The house stands")
    assert _decode_targets(words, sample) == " house stands"


def test_every_assistant_turn_is_a_target_in_training_only(tokenizer):
    words = tokenizer("chat", chat_templates.CHATML)
    [[sample]] = encode_responses([(json.dumps(LONGER), "is cold")], words, every_turn=True)
    learned = [i for i, target in zip(sample.ids, sample.is_target, strict=True) if target]
    end = words.convert_tokens_to_ids("<|im_end|>")
    assert learned == [*_plain(words, "sleeps"), end, *_plain(words, "is cold"), end]
    [[scored]] = encode_responses([(json.dumps(LONGER), "is cold")], words, every_turn=False)
    assert scored.ids == sample.ids
    assert sum(scored.is_target) == scored.num_last_targets == sample.num_last_targets


def test_turns_rendered_differently_later_become_separate_samples(tokenizer):
    words = tokenizer("chat", chat_templates.THINKING)
    [rows] = encode_responses([(json.dumps(LONGER), "is cold")], words, every_turn=True)
    assert len(rows) == 2
    assert [row.num_last_targets == sum(row.is_target) for row in rows] == [True, True]


@pytest.mark.parametrize(("prompt", "response", "limit", "expected"), [
    (3, 2, 4, (3, 2)),  # the last token is never an input
    (6, 2, 5, (4, 2)), (6, 6, 7, (3, 5)),  # the prompt keeps half
    (2, 9, 5, (2, 4)),
])  # fmt: skip
def test_long_samples_are_truncated_at_start_of_prompt(prompt, response, limit, expected):
    ids = [*range(100, 100 + prompt), *range(200, 200 + response)]
    sample = EncodedResponse(ids, [False] * prompt + [True] * response)
    fitted = fit_response(sample, limit, None)
    kept_prompt, answered = expected
    assert fitted.ids == ids[prompt - kept_prompt : prompt + answered]
    assert fitted.is_target == [False] * kept_prompt + [True] * answered


def test_first_token_is_kept_by_truncation():
    sample = EncodedResponse([7, 1, 2, 3, 4, 5], [False, False, True, False, False, True])
    fitted = fit_response(sample, 3, 7)
    assert (fitted.ids, fitted.is_target) == ([7, 3, 4, 5], [False, False, False, True])


def test_labels_are_response_tokens(tokenizer, tmp_path):
    text_tokenizer = tokenizer("{prompt}")
    rows = (Example("The old house", (" stands",)), Example("A man", (" walks", " in a red hat")))
    ctx = harness.make_context(tmp_path / "out", "text-generation")
    config = type("Config", (), {"to_dict": lambda self: {}, "pad_token_id": None})()
    samples = encode_split(Split("x", rows), config, text_tokenizer, ctx)
    assert len(samples) == 3
    assert [row.token_counts for row in samples] == [(len(row.input_ids), 0) for row in samples]
    batch = collate(samples, config)
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    for row, inputs, labels in zip(samples, batch["input_ids"], batch["labels"], strict=True):
        assert inputs[: len(row.input_ids) - 1].tolist() == row.input_ids[:-1]
        expected = [
            i if t else IGNORE_INDEX for i, t in zip(row.input_ids[1:], row.is_target[1:], strict=True)
        ]
        assert labels.tolist() == expected + [IGNORE_INDEX] * (len(labels) - len(expected))
    assert torch.equal(batch["attention_mask"].sum(1), torch.tensor([len(r.input_ids) - 1 for r in samples]))
    assert ctx.warnings == []
    truncated = encode_split(Split("x", rows), config, text_tokenizer, ctx, max_length=4)
    assert max(len(row.input_ids) for row in truncated) == 5
    assert message_codes(ctx.warnings) == ["truncated-texts"]
