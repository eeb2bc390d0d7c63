"""Where each setting of a generation comes from: the recipe, the model's generation config, a default."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from smelt.core.errors import InputError
from smelt.generation.config import GenerationConfig, GenerationSettings, resolve_generation
from tests.support.expected_errors import raises_code

CONFIG = {"is_encoder_decoder": True, "decoder_start_token_id": 3, "eos_token_id": 1, "pad_token_id": 0}
CONFIG |= {"vocab_size": 20}


def runner(model_config=None, **config):
    return SimpleNamespace(
        folder=Path("m"), config={**CONFIG, **config}, generation_config=model_config or {}
    )


BART = {
    "num_beams": 4, "do_sample": True, "length_penalty": 2.0, "early_stopping": True,
    "no_repeat_ngram_size": 3, "max_length": 142, "min_length": 56, "forced_bos_token_id": 0,
    "forced_eos_token_id": 2, "temperature": 0.5,
}  # fmt: skip


def test_unset_settings_come_from_the_model_except_the_search():
    generation = resolve_generation(GenerationSettings(), runner(BART))
    assert (generation.num_beams, generation.do_sample) == (1, False)
    assert (
        generation.no_repeat_ngram_size,
        generation.forced_bos_token_id,
        generation.forced_eos_token_id,
    ) == (3, 0, [2])
    assert (generation.max_total_length(1), generation.min_total_length(1)) == (142, 56)
    beams = resolve_generation(GenerationSettings(num_beams=4), runner(BART))
    assert (beams.length_penalty, beams.early_stopping) == (2.0, True)


def test_settings_of_the_recipe_override_the_model():
    wishes = GenerationSettings(
        num_beams=2, length_penalty=0.5, max_new_tokens=10, min_new_tokens=0, no_repeat_ngram_size=0
    )
    generation = resolve_generation(wishes, runner({**BART, "max_new_tokens": 99, "min_new_tokens": 7}))
    assert (generation.length_penalty, generation.no_repeat_ngram_size) == (0.5, 0)
    assert (generation.max_total_length(1), generation.min_total_length(1)) == (11, 1)
    generation = resolve_generation(GenerationSettings(min_length=4), runner({"min_new_tokens": 9}))
    assert generation.min_total_length(3) == 4


def test_missing_generation_config_falls_back_to_the_model_config():
    assert (
        resolve_generation(GenerationSettings(), runner(None, no_repeat_ngram_size=2)).no_repeat_ngram_size
        == 2
    )
    assert (
        resolve_generation(
            GenerationSettings(), runner({"top_k": 5}, no_repeat_ngram_size=2)
        ).no_repeat_ngram_size
        == 0
    )


@pytest.mark.parametrize(("model_config", "config", "prompt", "expected"), [
    ({}, {}, 1, 129), ({"max_length": 50}, {}, 1, 50), ({"max_length": 50, "max_new_tokens": 60}, {}, 4, 64),
    ({"max_length": 50}, {}, 60, 188),  # a prompt that is longer already: the default
    ({}, {"max_position_embeddings": 64}, 1, 65),  # 64 inputs: the last new token is no input
    ({}, {"model_type": "gpt2", "n_positions": 64}, 60, 65),
    ({}, {"model_type": "gpt2", "n_positions": 64}, 64, 65),
])  # fmt: skip
def test_maximum_text_length(model_config, config, prompt, expected):
    assert (
        resolve_generation(GenerationSettings(), runner(model_config, **config)).max_total_length(prompt)
        == expected
    )


UNSUPPORTED = "unsupported-generation-setting"


def test_begin_and_end_tokens():
    assert resolve_generation(GenerationSettings(), runner({"eos_token_id": [1, 2]})).eos == [1, 2]
    assert (
        resolve_generation(GenerationSettings(), runner(decoder_start_token_id=None, bos_token_id=7)).start
        == 7
    )
    assert resolve_generation(GenerationSettings(), runner(pad_token_id=None)).pad == 1
    assert resolve_generation(GenerationSettings(), runner(is_encoder_decoder=False)).start is None
    with raises_code("missing-special-token", InputError):
        resolve_generation(GenerationSettings(), runner(decoder_start_token_id=None))


@pytest.mark.parametrize(("model_config", "wishes", "code", "values"), [
    ({"encoder_no_repeat_ngram_size": 3}, {}, UNSUPPORTED, ("encoder_no_repeat_ngram_size", " 3", " 0.")),
    ({"sequence_bias": [[[1], 2.0]]}, {}, UNSUPPORTED, ("sequence_bias", "null")),
    ({"typical_p": 0.5}, {"do_sample": True}, UNSUPPORTED, ("typical_p", "0.5", "1.0")),
    ({"length_penalty": "long"}, {"num_beams": 2}, "wrong-value",
     ("m/generation_config.json", "length_penalty", "'long'")),
    ({"bad_words_ids": [[25]]}, {}, "token-outside-vocabulary", ("bad_words_ids", " 25", " 19.")),
    ({}, {"forced_bos_token_id": 20}, "token-outside-vocabulary", ("forced_bos_token_id", " 20")),
])  # fmt: skip
def test_unsupported_setting_is_reported(model_config, wishes, code, values):
    with raises_code(code, InputError) as caught:
        resolve_generation(GenerationSettings(**wishes), runner(model_config))
    assert all(value in str(caught.value) for value in values)


@pytest.mark.parametrize(("model_config", "wishes"), [
    ({"num_beam_groups": 2, "diversity_penalty": 0.5}, {"num_beams": 4}), ({"diversity_penalty": 0.5}, {}),
    ({"force_words_ids": [[5]]}, {"num_beams": 2}), ({"constraints": [1]}, {}), ({"penalty_alpha": 0.6}, {}),
    ({"dola_layers": "high"}, {}), ({"max_time": 2.0}, {}), ({"min_p": 0.1}, {"do_sample": True}),
    ({"guidance_scale": 1.5}, {}),
], ids=str)  # fmt: skip
def test_setting_that_changes_outputs_is_refused(model_config, wishes):
    with raises_code(UNSUPPORTED, InputError):
        resolve_generation(GenerationSettings(**wishes), runner(model_config))


@pytest.mark.parametrize("search", [{}, {"num_beams": 2}, {"do_sample": True}], ids=str)
def test_disabled_setting_is_accepted(search):
    """The values for which transformers adds no logits processor."""
    off = {
        "guidance_scale": 1.0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
        "num_beam_groups": 1, "diversity_penalty": 0.0, "penalty_alpha": 0.0, "force_words_ids": None,
        "constraints": [], "sequence_bias": {}, "stop_strings": [], "token_healing": False,
        "encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0,
    }  # fmt: skip
    resolve_generation(GenerationSettings(**search), runner(off))


def test_sampling_settings_do_not_affect_other_searches():
    assert (
        resolve_generation(
            GenerationSettings(), runner({"typical_p": 0.5, "temperature": 0.0, "top_p": 0})
        ).num_beams
        == 1
    )


@pytest.mark.parametrize(("model_config", "wishes", "expected"), [
    ({}, {}, "gen:greedy|max_new_tokens:128"), ({"max_length": 64}, {}, "gen:greedy|max_length:64"),
    ({"length_penalty": 0.6, "bad_words_ids": [[3]], "forced_eos_token_id": 1},
     {"num_beams": 4, "max_new_tokens": 32},
     "gen:beam 4|length_penalty:0.6|early_stopping:false|max_new_tokens:32|bad_words:1|forced_eos:[1]"),
    ({"top_k": 0, "min_length": 5, "repetition_penalty": 1.1}, {"do_sample": True, "seed": 2},
     "gen:sample seed 2|temperature:1|top_k:0|top_p:1|max_new_tokens:128|min_length:5"
     "|repetition_penalty:1.1"),
])  # fmt: skip
def test_signature_contains_the_effective_settings(model_config, wishes, expected):
    assert resolve_generation(GenerationSettings(**wishes), runner(model_config)).describe() == expected


@pytest.mark.parametrize(("settings", "new", "stops"), [
    ({"max_new_tokens": 3, "eos": [2]}, [5, 6, 7], True),
    ({"max_new_tokens": 3, "eos": [2]}, [5, 6, 2], False), ({"max_new_tokens": 3, "eos": [2]}, [5, 2], False),
    ({"max_length": 4, "eos": [2]}, [5, 6, 7], True), ({"max_length": 5, "eos": [2]}, [5, 6, 7], False),
    ({"max_new_tokens": 9, "positions": 3, "eos": [2]}, [5, 6, 7], True),
    # the end was forced upon a text that had not come to one
    ({"max_new_tokens": 3, "eos": [2], "forced_eos_token_id": [2]}, [5, 6, 2], True),
    ({"max_new_tokens": 3, "eos": [2], "forced_eos_token_id": [2]}, [5, 2], False),
])  # fmt: skip
def test_truncated_output_is_distinguished_from_an_ended_one(settings, new, stops):
    assert GenerationConfig(start=1, **settings).hit_length_limit(new) is stops


def test_engine_limit_caps_new_tokens_and_larger_settings_are_refused_early():
    """Without a number the outputs end where the engines do, and not with an error that loses the batch."""
    model = runner({}, max_position_embeddings=512)
    model.backend = SimpleNamespace(max_total_tokens=32)
    assert resolve_generation(GenerationSettings(), model).max_total_length(1) - 1 == 32
    assert resolve_generation(GenerationSettings(max_new_tokens=20), model).max_total_length(1) - 1 == 20
    with raises_code("engine-limit", InputError):
        resolve_generation(GenerationSettings(max_new_tokens=33), model)
    model.backend = SimpleNamespace(max_total_tokens=None)
    assert resolve_generation(GenerationSettings(max_new_tokens=33), model).max_total_length(1) - 1 == 33
    alone = runner({}, is_encoder_decoder=False, max_position_embeddings=512)
    alone.backend = SimpleNamespace(max_total_tokens=32)  # its runner lowers the config's positions
    assert resolve_generation(GenerationSettings(max_new_tokens=32), alone).max_total_length(1) - 1 == 32
    with raises_code("engine-limit", InputError):
        resolve_generation(GenerationSettings(max_new_tokens=33), alone)
