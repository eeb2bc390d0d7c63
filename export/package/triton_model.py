"""Text model for Triton's Python backend: tokenizes, calls the graph model, and decodes its outputs.

Needs numpy and, depending on the files in this folder, tokenizers or sentencepiece, and jinja2 for chats.
Settings: settings.json.
Shapes: B = texts of all requests of a call, L = tokens of the longest.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np


class TritonPythonModel:
    """One instance, created by Triton."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the files in this folder. args: Triton's; path of the repository and version."""
        self.triton: Any = importlib.import_module("triton_python_backend_utils")  # part of Triton's Python
        folder = Path(args["model_repository"]) / args["model_version"]
        self.settings: dict[str, Any] = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        self.template = self.settings["prompt_template"]
        self.rendering: Any = None
        if self.template is not None and self.template["chat_template"]:
            spec: Any = importlib.util.spec_from_file_location("rendering", folder / "prompt_rendering.py")
            self.rendering = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(self.rendering)
            self.chat = self.rendering.compile_template(self.template["chat_template"])
        self.pieces: Any = None
        self.tokenizer: Any = None
        if (folder / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self.tokenizer.no_padding()
            self.tokenizer.no_truncation()
        else:
            import sentencepiece

            self.pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
            self.words = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
            self.names = {token_id: token for token, token_id in self.words.items()}

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer all requests with one call of the graph."""
        triton = self.triton
        text_arrays = [triton.get_input_tensor_by_name(request, "TEXT").as_numpy() for request in requests]
        texts = [text.decode("utf-8") for array in text_arrays for text in array.reshape(-1)]
        try:
            results = self.answers(texts)
        except triton.TritonModelException as error:
            failure = triton.TritonError(str(error))
            return [triton.InferenceResponse(output_tensors=[], error=failure) for _ in requests]
        responses, start = [], 0
        for array in text_arrays:
            part = results[start : start + array.size]
            start += array.size
            responses.append(triton.InferenceResponse(output_tensors=[triton.Tensor("ANSWER", part)]))
        return responses

    def answers(self, texts: list[str]) -> Any:
        """Return an array with a row for each of `texts`."""
        settings, triton = self.settings, self.triton
        token_rows = [self.encode(settings["prefix"] + text) for text in texts]
        ids, mask = self.pad_batch(token_rows)
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        request = triton.InferenceRequest(
            model_name=settings["graph"],
            requested_output_names=[settings["output"]],
            inputs=[triton.Tensor(name, inputs[name]) for name in settings["inputs"]],
        )
        response = request.exec()
        if response.has_error():
            raise triton.TritonModelException(response.error().message())
        outputs = triton.get_output_tensor_by_name(response, settings["output"]).as_numpy()
        if settings["output"] != "sequences":
            return outputs
        start = ids.shape[1] if settings["causal"] else 1
        lines = [self.decode(row[start:].tolist()) for row in outputs]
        if settings["causal"] and self.template is None:  # a continuation, not a response
            lines = [a + b for a, b in zip(texts, lines, strict=True)]
        return np.array([[line.encode("utf-8")] for line in lines], dtype=object)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text with special tokens, truncated to the model's maximum."""
        settings = self.settings
        if self.rendering is not None:  # a rendered chat contains its special tokens
            text = self.rendering.render_chat(self.chat, text, self.template["special_tokens"])
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            max_tokens = settings["room"] + len(settings["before"]) + len(settings["after"])
            lead = ids[:1] if len(ids) > max_tokens > 1 and ids[0] == settings["bos"] else []
            return lead + ids[max(0, len(ids) - max_tokens + len(lead)) :] or [settings["empty"]]
        if self.template is not None:
            text = self.template["template"].replace("{prompt}", text)
        text = text.lower() if settings["lower"] else text
        prefix_tokens, suffix_tokens = settings["before"], settings["after"]
        if self.tokenizer is not None:
            inner = self.tokenizer.encode(text).ids
            inner = inner[len(prefix_tokens) : len(inner) - len(suffix_tokens)]
        else:
            subwords = self.pieces.encode(text, out_type=str)
            inner = [self.words.get(subword, settings["unknown"]) for subword in subwords]
        max_text_tokens = settings["room"]
        inner = (
            inner[max(0, len(inner) - max_text_tokens) :]
            if settings["keeps_end"]
            else inner[:max_text_tokens]
        )
        return [*prefix_tokens, *inner, *suffix_tokens] or [settings["empty"]]

    def pad_batch(self, token_rows: list[list[int]]) -> tuple[Any, Any]:
        """Return ids and mask, int64 [B, L]; prompts are padded on the left."""
        length = max(map(len, token_rows))
        ids = np.full((len(token_rows), length), self.settings["pad"], dtype=np.int64)
        mask = np.zeros_like(ids)
        for row_index, row in enumerate(token_rows):
            row_slice = slice(length - len(row), length) if self.settings["causal"] else slice(len(row))
            ids[row_index, row_slice], mask[row_index, row_slice] = row, 1
        return ids, mask

    def decode(self, tokens: list[int]) -> str:
        """Return the text of new tokens, up to the end token."""
        end = next((i for i, token in enumerate(tokens) if token in self.settings["eos"]), len(tokens))
        tokens = tokens[:end]
        if self.tokenizer is not None:
            return str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        visible_tokens = [self.names[token] for token in tokens if token not in self.settings["special"]]
        return str(self.pieces.decode_pieces(visible_tokens)).replace("\u2581", " ").strip()
