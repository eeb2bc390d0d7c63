"""Translation with onnxruntime, numpy and a tokenizer: python infer.py "TEXT", or lines on stdin."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from smelt.export.package.standalone.batches import length_batches
from smelt.export.package.standalone.generation_inputs import generation_inputs, new_tokens
from smelt.export.package.standalone.session import open_graph, run_command_line
from smelt.export.package.standalone.tokenizers_reader import Tokenizer


class Translator:
    """Translator(folder)(texts) -> texts. Thread-safe; `threads` is per call."""

    def __init__(self, folder: str | Path = Path(__file__).parent, threads: int | None = None) -> None:
        config = json.loads((Path(folder) / "infer.json").read_text(encoding="utf-8"))
        self.tokenizer, self.generation = Tokenizer(Path(folder), config["tokenizer"]), config["generation"]
        path = Path(folder) / self.generation["graph"]
        # sizes in the greedy graph depend on the mask
        self.graph = open_graph(path, threads or config["threads"], path.name != "generate.onnx")
        self.search = generation_inputs(self.generation, 1, self.generation["max_new_tokens"])

    def __call__(self, texts: Iterable[str], batch_size: int = 32) -> list[str]:
        """Return the output text of each text, in their order."""
        token_rows = [self.tokenizer.encode(text) for text in texts]
        answers = [""] * len(token_rows)
        for indices, ids, mask in length_batches(token_rows, self.tokenizer.settings["pad"], batch_size):
            feeds = {"input_ids": ids, "attention_mask": mask} | self.search
            for i, row in zip(indices, self.graph.run(["sequences"], feeds)[0], strict=True):
                answers[i] = self.tokenizer.decode(new_tokens(row, 1, self.generation["eos"]))
        return answers


if __name__ == "__main__":
    run_command_line(Translator, Translator.__call__, __doc__)
