"""BART, and the layout of similar models. Source: transformers' modeling_bart.py."""

from __future__ import annotations

from dataclasses import dataclass

from smelt.models.families.family import (
    Attention,
    Config,
    Family,
    FeedForward,
    PublishedLearningRate,
    ResidualStream,
    Stack,
    TokenizerFiles,
)
from smelt.models.families.roberta import ROBERTA_TOKENIZER

LM_HEAD = ("lm_head",)
LOGITS_BIAS = "final_logits_bias"


@dataclass(frozen=True)
class BartLayout:
    """The differences between models similar to BART.

    pre_norm: see `ResidualStream`. has_embedding_norm, has_final_norm: whether each side has a norm before
    its first and after its last block. position_table: the tensor of a side's table of positions.
    """

    pre_norm: bool
    has_embedding_norm: bool
    has_final_norm: bool
    position_table: str = "embed_positions.weight"

    def stacks(self, config: Config) -> tuple[Stack, ...]:
        """Return the encoder's and the decoder's blocks."""
        return (
            self._stack("encoder", (bart_attention("self_attn", "encoder_attention_heads"),)),
            self._stack(
                "decoder",
                (
                    bart_attention("self_attn", "decoder_attention_heads"),
                    bart_attention("encoder_attn", "decoder_attention_heads", cross=True),
                ),
            ),
        )

    def _stack(self, side: str, attentions: tuple[Attention, ...]) -> Stack:
        at = f"model.{side}"
        stream = ResidualStream(
            (f"{at}.embed_tokens.weight", f"{at}.{self.position_table}"),
            part_norms=(*(f"{attention.name}_layer_norm" for attention in attentions), "final_layer_norm"),
            pre_norm=self.pre_norm,
            embedding_norm=f"{at}.layernorm_embedding" if self.has_embedding_norm else None,
            final_norm=f"{at}.layer_norm" if self.has_final_norm else None,
        )
        return Stack(
            name=f"{side}_layers",
            num_layers_key=f"{side}_layers",
            module_path=f"{at}.layers",
            attentions=attentions,
            feed_forward=FeedForward(
                "",
                "fc1",
                "fc2",
                intermediate_size_key=f"{side}_ffn_dim",
                activation_key="activation_function",
            ),
            stream=stream,
            causal=side == "decoder",
        )


def embedding_scale(config: Config) -> float:
    """Return the scale of the token embedding."""
    return float(config["d_model"]) ** 0.5 if config.get("scale_embedding") else 1.0


def bart_attention(name: str, setting: str, cross: bool = False) -> Attention:
    """Return an attention of BART's layout; `setting` is the config key of its number of heads."""
    return Attention(
        name,
        query=f"{name}.q_proj",
        key=f"{name}.k_proj",
        value=f"{name}.v_proj",
        out=f"{name}.out_proj",
        heads_attribute="num_heads",
        head_dim_attribute="head_dim",
        heads_key=setting,
        cross=cross,
    )


FAIRSEQ_VERSION_TENSORS = r"(model\.)?(en|de)coder\.version"
FAMILY = Family(
    name="bart",
    architecture="seq2seq",
    tasks=("summarization", "translation"),
    stacks=BartLayout(pre_norm=False, has_embedding_norm=True, has_final_norm=False).stacks,
    embedding_suffixes=("shared.weight", "encoder.embed_tokens.weight"),
    hidden_size_key="d_model",
    learning_rate=PublishedLearningRate(3e-5, 1024),  # fairseq's examples/bart, for summarization
    head_modules=LM_HEAD,
    logits_bias=LOGITS_BIAS,
    embedding_scale=embedding_scale,
    tokenizer_files=TokenizerFiles(("vocab.json", "merges.txt")),
    tokenizer_spec=ROBERTA_TOKENIZER,
    unused_tensors=(FAIRSEQ_VERSION_TENSORS,),
    decoder_start="eos",
    forces_eos=True,
)
