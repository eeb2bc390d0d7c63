"""How many tokens a model takes: only a table of positions that is there is a limit."""

import json

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from smelt.generation.config import GenerationSettings
from smelt.models.checkpoint import load_tokenizer
from smelt.models.text_rules import NO_LIMIT, max_input_length, position_limit, position_table_size
from smelt.models.tokenizer import encode_texts
from smelt.runtimes.predict_texts import generate_texts, pad_batch
from smelt.runtimes.registry import open_runner
from tests.support.models import seq2seq, tiny

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("config", "table", "limit"), [
    ({"model_type": "marian", "max_position_embeddings": 512}, 512, 512),
    ({"model_type": "gpt2", "n_positions": 64}, 64, 64),
    ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 514, 512),
    ({"model_type": "opt", "max_position_embeddings": 64, "pad_token_id": 1}, 64, 64),  # two rows more
    ({"model_type": "t5", "n_positions": 512}, None, None), ({"model_type": "marian"}, None, None),
    ({"model_type": "marian", "max_position_embeddings": "many"}, None, None),
])  # fmt: skip
def test_limit_is_size_of_position_table(config, table, limit):
    assert (position_table_size(config), position_limit(config)) == (table, limit)


@pytest.mark.parametrize(("longest", "expected"), [(40, 40), (10**30, NO_LIMIT)])
def test_model_without_position_table_is_limited_by_tokenizer(longest, expected):
    tokenizer = type("Words", (), {"model_max_length": longest})()
    assert max_input_length(tokenizer, {"model_type": "t5", "n_positions": 8}) == expected
    assert max_input_length(tokenizer, {"model_type": "bart", "max_position_embeddings": 8}) == 8


def test_t5_exceeds_n_positions_as_transformers(tmp_path):
    folder = seq2seq.write_t5(tmp_path / "m", n_positions=8)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 10**30}))
    tokenizer = load_tokenizer(folder)
    texts = [" ".join(tiny.SENTENCES), tiny.SENTENCES[0]]
    encoded = encode_texts(
        texts, tokenizer, max_input_length(tokenizer, {"model_type": "t5", "n_positions": 8})
    )
    assert encoded.truncated == 0
    batch = pad_batch(encoded, [0, 1], tokenizer.pad_token_id)
    other = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    reference_ids = other.generate(
        torch.from_numpy(batch.input_ids),
        attention_mask=torch.from_numpy(batch.attention_mask),
        min_new_tokens=30,
        max_new_tokens=30,
    )
    with open_runner(tiny.as_artifact(folder)) as runner:
        texts_out = generate_texts(runner, texts, GenerationSettings(min_new_tokens=30, max_new_tokens=30))
    assert texts_out == tokenizer.batch_decode(reference_ids, skip_special_tokens=True)
    assert reference_ids.shape[1] == 31  # the start token and 30 new ones
