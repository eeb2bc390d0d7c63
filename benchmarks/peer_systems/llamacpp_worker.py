"""llama.cpp by llama-cpp-python: its own file format, its own quantizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import llama_cpp

from peer_systems.worker import Case, Job, Opened, Rows, main

NAME = "model.gguf"
# Of Hugging Face's names for a layer's matrices those of llama.cpp.
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make(job: Job) -> None:
    """Write a GGUF file of float32, or quantize the one of the system that this one begins with."""
    files = Path(job["files"])
    files.mkdir(parents=True, exist_ok=True)
    if job["variant"] == "F32":
        _convert(Path(job["model"]), files / NAME)
        return
    wanted = llama_cpp.llama_model_quantize_default_params()
    wanted.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{job['variant']}")
    source = str(Path(job["from"]) / NAME).encode()
    if llama_cpp.llama_model_quantize(source, str(files / NAME).encode(), wanted):
        raise SystemExit("llama_model_quantize failed.")


def _convert(model: Path, out: Path) -> None:
    """Write the tensors of a Llama under llama.cpp's names; tokens stay numbers, no vocabulary is needed."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    tensors = load_file(model / "model.safetensors")
    writer.add_tensor("token_embd.weight", tensors["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", tensors["model.norm.weight"])
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in LAYER.items():
            weight = tensors[f"model.layers.{layer}.{theirs}.weight"]
            if ours in ("attn_q", "attn_k"):
                weight = _interleaved(weight, heads if ours == "attn_q" else groups)
            writer.add_tensor(f"blk.{layer}.{ours}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: Any, heads: int) -> Any:
    """Put the halves that transformers rotates side by side, as llama.cpp rotates neighbors."""
    rows, width = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, width)
    return halves.swapaxes(1, 2).reshape(rows, width)


def serve(job: Job) -> Opened:
    """Open the file; greedy search, from an empty cache each time."""
    model = llama_cpp.Llama(
        str(Path(job["files"]) / NAME),
        n_ctx=512,
        n_batch=512,
        n_threads=job["threads"],
        n_threads_batch=job["threads"],
        verbose=True,  # into the log: without it an abort of llama.cpp leaves no message
    )

    def run(rows: Rows, case: Case) -> Rows:
        outputs = []
        for row in rows:
            model.reset()
            tokens = model.generate(row, temp=0.0, top_k=1, repeat_penalty=1.0)
            outputs.append([next(tokens) for _ in range(case["new_tokens"])])
        return outputs

    return run, f"llama-cpp-python {llama_cpp.__version__}"


if __name__ == "__main__":
    main(make, serve)
