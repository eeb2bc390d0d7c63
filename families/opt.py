"""OPT. Source: transformers' modeling_opt.py (Zhang et al. 2022, arXiv:2205.01068).

Blocks are a BART decoder's without cross-attention. They flatten their states to [texts * tokens, width]
before the feed-forward part. Places are counted over the tokens that are no padding; the first is row 2 of
the table, which has two rows more than the config says.
"""

from __future__ import annotations

from smelt.families.bart import FAIRSEQ_VERSION
from smelt.families.encoder_decoder import HEAD, attention
from smelt.families.family import (
    Config,
    Family,
    FeedForward,
    Rate,
    Stack,
    TokenizerFiles,
    TokenizerForm,
)
from smelt.families.stream import Stream

_AT = "model.decoder"
_END = "</s>"


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the blocks."""
    stream = Stream(
        (f"{_AT}.embed_tokens.weight", f"{_AT}.embed_positions.weight"),
        norms=("self_attn_layer_norm", "final_layer_norm"),
        norms_first=True,
        closing=None if config.get("_remove_final_layer_norm") else f"{_AT}.final_layer_norm",
    )
    block = FeedForward("", "fc1", "fc2", "ffn_dim", "activation_function")
    of_heads = attention("self_attn", "num_attention_heads")
    return (Stack("layers", "num_hidden_layers", f"{_AT}.layers", (of_heads,), block, stream, causal=True),)


def refuses(config: Config) -> list[str]:
    """Say what of a config smelt cannot follow."""
    found = []
    width, words = config.get("hidden_size"), config.get("word_embed_proj_dim")
    if words not in (None, width):
        found.append(
            f"word_embed_proj_dim is {words} and hidden_size is {width}: this version takes no OPT whose"
            " words have another width than its hidden states. Take a model where both are equal, as they are"
            " in all published OPTs but OPT-350m."
        )
    if not config.get("do_layer_norm_before", True):
        found.append(
            "do_layer_norm_before is false: this version takes no OPT whose norms stand behind the sums. Take"
            " a model where it is true, as in all published OPTs but OPT-350m."
        )
    if not config.get("layer_norm_elementwise_affine", True):
        found.append("layer_norm_elementwise_affine is false: norms without weights are not supported.")
    return found


FAMILY = Family(
    name="opt",
    kind="decoder",
    tasks=("language-modeling",),
    stacks=stacks,
    embedding=("embed_tokens.weight",),
    width="hidden_size",
    rate=Rate(2e-5, 4096),  # Stanford Alpaca's command for OPT-6.7B
    head=HEAD,
    tokenizer=TokenizerFiles(("vocab.json", "merges.txt")),
    new_tokenizer=TokenizerForm(
        ("<s>", "<pad>", _END, "<unk>"),
        {"bos": _END, "eos": _END, "unk": _END, "pad": "<pad>"},
        f"{_END} $A",
        f"{_END} $A {_END} $B",
    ),
    unread=(FAIRSEQ_VERSION,),
    refuses=refuses,
)
