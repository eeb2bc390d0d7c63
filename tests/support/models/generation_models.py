"""Tiny random models that generate, and what Hugging Face `generate` says on the same batch."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from smelt.generation.backend import Batch
from smelt.generation.search import generate_resolved

VOCABULARY, PAD, EOS = 24, 0, 1
_SHARED = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": EOS}
_SEQ2SEQ = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64,
    "bos_token_id": 2, "decoder_start_token_id": 3, "forced_eos_token_id": None,
}  # fmt: skip
_CAUSAL = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 2,
}  # fmt: skip


def _model_classes() -> dict[str, tuple[Any, Any]]:
    import transformers as t

    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    opt = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    opt |= {"max_position_embeddings": 64, "bos_token_id": 2}
    gpt2 = {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 2}
    return {
        "marian": (t.MarianMTModel, t.MarianConfig(**_SHARED, **_SEQ2SEQ, decoder_vocab_size=VOCABULARY)),
        "bart": (t.BartForConditionalGeneration, t.BartConfig(**_SHARED, **_SEQ2SEQ)),
        "t5": (t.T5ForConditionalGeneration, t.T5Config(**_SHARED, **t5)),
        "gpt2": (t.GPT2LMHeadModel, t.GPT2Config(**_SHARED, **gpt2)),
        "opt": (t.OPTForCausalLM, t.OPTConfig(**_SHARED, **opt)),
        "llama": (t.LlamaForCausalLM, t.LlamaConfig(**_SHARED, **_CAUSAL)),
        "qwen2": (t.Qwen2ForCausalLM, t.Qwen2Config(**_SHARED, **_CAUSAL)),
        "mistral": (t.MistralForCausalLM, t.MistralConfig(**_SHARED, **_CAUSAL, head_dim=4)),
    }


SEQ2SEQ, CAUSAL = ("marian", "bart", "t5"), ("gpt2", "opt", "llama", "qwen2", "mistral")


# What the recipe asks for, and what the model's generation config has in addition.
GREEDY_CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}), ({"max_new_tokens": 1}, {}), ({"min_new_tokens": 4}, {"eos_token_id": [1, 5, 9, 11]}),
    ({"no_repeat_ngram_size": 2, "bad_words_ids": [[7], [3, 4], [1]]}, {}),
    ({"no_repeat_ngram_size": 1, "bad_words_ids": [[7], [12]]}, {"eos_token_id": [1, 5]}),
    ({"repetition_penalty": 1.8}, {}),
    ({"min_length": 9, "forced_eos_token_id": 1}, {"eos_token_id": [1, 4, 8]}),
    ({"forced_bos_token_id": 6, "begin_suppress_tokens": [7, 8, 9, 10]}, {}),
    ({}, {"forced_eos_token_id": [9, 5], "eos_token_id": [1, 5, 9]}),
    ({"suppress_tokens": [4, 12, 13]}, {"remove_invalid_values": True}),
]  # fmt: skip
BEAM_CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"num_beams": 2}, {}), ({"num_beams": 4, "max_new_tokens": 1}, {}),
    ({"num_beams": 3, "length_penalty": 2.0, "early_stopping": True}, {"eos_token_id": [1, 5, 9, 11]}),
    ({"num_beams": 5, "length_penalty": -1.0, "early_stopping": False}, {"eos_token_id": [1, 5, 9]}),
    ({"num_beams": 4, "length_penalty": 0.5, "early_stopping": "never"}, {"eos_token_id": [1, 7, 8, 10]}),
    ({"num_beams": 4, "length_penalty": 0.0, "early_stopping": "never"}, {"eos_token_id": [1, 6]}),
    ({"num_beams": 3, "no_repeat_ngram_size": 2, "bad_words_ids": [[7], [3, 4], [5, 6, 9], [1]]}, {}),
    ({"num_beams": 3, "no_repeat_ngram_size": 1, "min_new_tokens": 4}, {"eos_token_id": [1, 5, 9, 11]}),
    ({"num_beams": 2, "repetition_penalty": 1.8}, {"renormalize_logits": True}),
    ({"num_beams": 4, "min_length": 9, "forced_eos_token_id": 1}, {"eos_token_id": [1, 4, 8]}),
    ({"num_beams": 4, "forced_bos_token_id": 6, "begin_suppress_tokens": [7, 8, 9, 10]}, {}),
    ({"num_beams": 3, "suppress_tokens": [4, 12, 13]}, {"remove_invalid_values": True}),
    # what a longer text may still be worth decides here, and how many candidates are kept for many ends
    ({"num_beams": 2, "length_penalty": 2.0, "early_stopping": "never"},
     {"eos_token_id": [6, 8, 15, 20, 21, 22]}),
    ({"num_beams": 2, "length_penalty": 5.0, "early_stopping": "never", "max_new_tokens": 25},
     {"eos_token_id": [5, 14, 15, 21]}),
]  # fmt: skip


def random_settings(draw: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return random settings, and those of a generation config with them, as in GREEDY and BEAMS."""

    def tokens(most: int) -> list[int]:
        return draw.sample(range(1, VOCABULARY), draw.randint(1, most))

    optional: dict[str, Any] = {
        draw.choice(["min_new_tokens", "min_length"]): draw.randint(0, 8),
        "no_repeat_ngram_size": draw.randint(0, 3),
        "repetition_penalty": draw.choice([0.7, 1.0, 1.3, 1.8]),
        "bad_words_ids": [tokens(3) for _ in range(draw.randint(1, 3))],
        "forced_bos_token_id": draw.randint(4, VOCABULARY - 1),
        "forced_eos_token_id": 1,
        "suppress_tokens": tokens(3),
        "begin_suppress_tokens": tokens(3),
    }
    extra_settings = {
        "eos_token_id": [1, *tokens(4)],
        "renormalize_logits": True,
        "remove_invalid_values": True,
    }
    wishes = {"max_new_tokens": draw.randint(1, 20)}
    wishes |= {name: value for name, value in optional.items() if draw.random() < 0.25}
    if draw.random() < 0.6:
        of_beams = {
            "length_penalty": draw.choice([-1.0, 0.0, 0.5, 2.0]),
            "early_stopping": draw.choice([True, False, "never"]),
        }
        wishes["num_beams"] = draw.randint(2, 5)
        wishes |= {name: value for name, value in of_beams.items() if draw.random() < 0.6}
    for name in {"suppress_tokens", "begin_suppress_tokens"} & wishes.keys():  # transformers refuses both
        allowed = {wishes.get("forced_bos_token_id")}
        wishes[name] = [token for token in wishes[name] if token not in allowed] or [EOS]
    return wishes, {name: value for name, value in extra_settings.items() if draw.random() < 0.35}


def make_model(kind: str, seed: int = 0) -> Any:
    """Return a random model of `kind` whose outputs differ from text to text."""
    import torch

    torch.manual_seed(seed)
    cls, config = _model_classes()[kind]
    model = cls(config).eval()
    spread = {"t5": 0.6, "gpt2": 0.5}.get(kind, 0.7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.normal_(0, spread)
    return model


def write_model(kind: str, path: Path, seed: int = 0) -> Path:
    """Write a random model without tokenizer."""
    make_model(kind, seed).save_pretrained(path)
    return path


def random_batch(rows: int, seed: int, left: bool = False) -> Batch:
    """Return random texts of different lengths, padded on the right (or left)."""
    random = np.random.default_rng(seed)
    lengths = [7, *random.integers(2, 8, rows - 1)] if rows > 1 else [5]
    ids = np.full((rows, max(lengths)), PAD, dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, length in enumerate(lengths):
        span = slice(-length, None) if left else slice(0, length)
        ids[row, span], mask[row, span] = random.integers(4, VOCABULARY, length), 1
    return Batch(ids, mask)


class CausalRunner:
    """A runner around a decoder-only model of transformers: prefills all of a prompt but its last token."""

    name, version, device, write_model = "test", "0", "cpu", Path("test")
    reduces_logits = False
    generator = staticmethod(generate_resolved)

    def __init__(self, model: Any) -> None:
        self.backend = SimpleNamespace(model=model)
        self.config: dict[str, Any] = model.config.to_dict()
        self.generation_config: dict[str, Any] = model.generation_config.to_diff_dict()

    def encode(self, batch: Batch) -> dict[str, Any]:
        import torch
        from transformers import DynamicCache

        state = {
            "cache": DynamicCache(config=self.backend.model.config),
            "mask": torch.from_numpy(batch.attention_mask[:, :-1]),
        }
        if batch.input_ids.shape[1] > 1:
            self._feed(state, torch.from_numpy(batch.input_ids[:, :-1]))
        return state

    def decode_step(self, state: dict[str, Any], tokens: Any) -> Any:
        import torch

        state["mask"] = torch.cat([state["mask"], torch.ones(len(tokens), 1, dtype=torch.int64)], dim=1)
        return self._feed(state, torch.from_numpy(tokens)[:, None])[:, -1].numpy()

    def _feed(self, state: dict[str, Any], ids: Any) -> Any:
        import torch

        positions = (state["mask"].cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.inference_mode():
            return self.backend.model(
                input_ids=ids,
                attention_mask=state["mask"],
                position_ids=positions,
                past_key_values=state["cache"],
                use_cache=True,
            ).logits

    def reorder_cache(self, state: dict[str, Any], rows: Any) -> dict[str, Any]:
        import torch

        state["cache"].reorder_cache(torch.from_numpy(rows))
        state["mask"] = state["mask"][torch.from_numpy(rows)]
        return state


def transformers_tokens(model: Any, batch: Batch, **wishes: Any) -> list[list[int]]:
    """Return the new tokens of each row that transformers' `generate` gives, up to the end token."""
    import torch

    out = model.generate(
        torch.from_numpy(batch.input_ids), attention_mask=torch.from_numpy(batch.attention_mask), **wishes
    )
    prompt = 1 if model.config.is_encoder_decoder else batch.input_ids.shape[1]
    eos = wishes.get("eos_token_id", model.generation_config.eos_token_id)
    eos = eos if isinstance(eos, list) else [eos]
    rows = []
    for row in out[:, prompt:].tolist():
        end_indices = [i for i, token in enumerate(row) if token in eos]
        rows.append(row[: end_indices[0] + 1] if end_indices else row)
    return rows


def compare_tokens(
    runner: Any, torch_model: Any, batch: Batch, settings: dict[str, Any], config: dict[str, Any]
) -> Any:
    """Return the new tokens that `runner` gives and those of transformers' `generate`.

    Args:
        runner: a runner of the model.
        torch_model: the model.
        batch: what to begin with.
        settings: settings of a recipe's generation.
        config: what the model's generation config has in addition.
    """
    from smelt.generation.config import GenerationSettings, resolve_generation

    before = dict(runner.generation_config)
    runner.generation_config.update(config)
    options: dict[str, Any] = {"max_new_tokens": 12, **settings}
    decoding = resolve_generation(GenerationSettings.model_validate(options), runner)
    tokens = runner.generator(runner, batch, decoding)
    runner.generation_config.clear()
    runner.generation_config.update(before)
    options.setdefault("num_beams", 1)
    return tokens, transformers_tokens(torch_model, batch, do_sample=False, **options, **config)
