"""Where in a model we are: what its blocks gave so far is kept, and it can be run on from there.

The model itself calls its blocks: those before the current one are stood in for by what was kept of them, and
its masks, rotary positions, windows and biases are computed by its own code, so that nothing of a family is
written down here.

Shapes: B = batch, S = tokens of a sequence, D = width of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from smelt.compress.calibration.kept_states import Given, KeptStates
from smelt.compress.calibration.observe import Layers, See, watched
from smelt.compress.train.data import TensorBatch
from smelt.families.family import Stack
from smelt.families.walk import Block

# States of all rows that take more than this lie on disk.
MEMORY_BYTES = 2**30


class Walk:
    """A model that is gone through block by block.

    states: by batch, what the last place gave that was run. encoded: by batch, what the encoder gave.
    """

    def __init__(self, model: Any, batches: Sequence[TensorBatch], folder: Path, limit_bytes: int) -> None:
        self.model, self.batches = model, batches
        self.states = KeptStates(folder / "states", limit_bytes)
        self.encoded: KeptStates | None = None
        self._encoded = KeptStates(folder / "encoded", limit_bytes)
        self._stack: Stack | None = None
        self._done = 0  # places of the stack that were run

    def reach(self, block: Block) -> None:
        """Run what stands before `block` and was not run yet."""
        self.reach_place(block.stack, block.number)

    def reach_place(self, stack: Stack, number: int) -> None:
        """Run what stands before the place `number` of `stack` and was not run yet."""
        if self._stack is not None and self._stack.name != stack.name:
            self._run_to(len(self._places(self._stack)))
            with torch.inference_mode():
                for batch in range(len(self.batches)):
                    self._encoded.put(batch, self._encoder_states(batch))
            self.encoded, self._stack = self._encoded, None
        if self._stack is None:
            self._stack, self._done = stack, 0
        self._run_to(number)

    def is_past(self, stack: Stack, number: int) -> bool:
        """Say whether more was run than what stands before the place `number` of `stack`."""
        if self._stack is None or self._stack.name != stack.name:
            return self.encoded is not None
        return self._done > number

    @contextmanager
    def resumed(self, number: int) -> Iterator[None]:
        """Let the model, called on the batch `number`, go on meanwhile from what is kept."""
        with ExitStack() as stack:
            if self.encoded is not None:
                states = self.encoded.get(number, str(self.model.device))
                encoder = self.model.get_encoder()
                stack.callback(restored(encoder))
                encoder.forward = lambda *_, **__: BaseModelOutput(last_hidden_state=states)
            if self._stack is not None:
                stack.enter_context(self._standing_in(number, None))
            yield

    def advance(self, block: Block) -> None:
        """Run `block`, and keep what it gives instead of what it was fed."""
        self._run_to(block.number + 1)

    def observe(self, block: Block, layers: Layers, see: See) -> None:
        """Run `block`, and the later ones that hold some of `layers`, and show what those get."""
        wanted = {module for found in layers.values() for module in found}
        places = self._places(block.stack)
        last = max(at for at, m in enumerate(places) if at == block.number or _holds(m, wanted))
        batch: TensorBatch = {}
        with watched(self.model, layers, see, batch), torch.inference_mode():
            for number, inputs in enumerate(self.batches):
                batch.clear()
                batch.update(inputs)
                self._run(number, last)

    def observe_behind(self, layers: Layers, see: See) -> None:
        """Run what stands behind all blocks, on what they gave, and show what `layers` there get."""
        self._run_to(len(self._places(self._current)))
        batch: TensorBatch = {}
        with watched(self.model, layers, see, batch), torch.inference_mode():
            for number, inputs in enumerate(self.batches):
                batch.clear()
                batch.update(inputs)
                with self._standing_in(number, None):
                    self.model(**self._inputs(number))

    def _run_to(self, end: int) -> None:
        """Run the places before `end` that were not run yet."""
        if end > self._done:
            with torch.inference_mode():
                for number in range(len(self.batches)):
                    self.states.put(number, self._run(number, end - 1))
            self._done = end

    def _places(self, stack: Stack) -> list[nn.Module]:
        return list(self.model.get_submodule(stack.place))

    def _run(self, number: int, last: int) -> Given:
        """Return what the place `last` gives for a batch, from what is kept."""
        try:
            with self._standing_in(number, last):
                self.model(**self._inputs(number))
        except _Reached as reached:
            return reached.result
        raise RuntimeError(f"the model never called block {last} of {len(self._places(self._current))}")

    def _encoder_states(self, number: int) -> Given:
        """Return what the encoder makes of what its last block gave, float [B, S, D]."""
        inputs = self.batches[number]
        with self._standing_in(number, None):
            found: Given = self.model.get_encoder()(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
            ).last_hidden_state
        return found

    def _inputs(self, number: int) -> dict[str, Any]:
        inputs: dict[str, Any] = {k: v for k, v in self.batches[number].items() if k != "labels"}
        if self.encoded is not None:
            del inputs["input_ids"]
            states = self.encoded.get(number, str(self.model.device))
            inputs["encoder_outputs"] = BaseModelOutput(last_hidden_state=states)
        return inputs | ({"use_cache": False} if self.model.can_generate() else {})

    @property
    def _current(self) -> Stack:
        assert self._stack is not None
        return self._stack

    @contextmanager
    def _standing_in(self, number: int, last: int | None) -> Iterator[None]:
        """Let the places that were run give what is kept of the last of them; end the run behind `last`."""
        places = self._places(self._current)
        kept = self.states.get(number, str(self.model.device)) if self._done else None
        calls = 0

        def stand_in(forward: Callable[..., Given]) -> Callable[..., Given]:
            def call(*args: Any, **kwargs: Any) -> Given:
                nonlocal calls
                at, calls = calls, calls + 1
                if at < self._done:
                    assert kept is not None
                    return kept
                result = forward(*args, **kwargs)
                if at == last:
                    raise _Reached(result)
                return result

            return call

        modules: list[Any] = list(dict.fromkeys(places))
        with ExitStack() as stack:
            for module in modules:
                stack.callback(restored(module))
                module.forward = stand_in(module.forward)
            yield


class _Reached(Exception):  # noqa: N818 - no error: it ends a run behind the block that was wanted
    def __init__(self, result: Given) -> None:
        super().__init__()
        self.result = result


def _holds(module: nn.Module, wanted: set[nn.Module]) -> bool:
    return not wanted.isdisjoint(module.modules())


def restored(module: Any) -> Callable[[], None]:
    """Return what gives `module` the forward again that it has now: its own, or that of its class."""
    own = vars(module).get("forward")

    def restore() -> None:
        if own is None:
            del module.forward
        else:
            module.forward = own

    return restore
