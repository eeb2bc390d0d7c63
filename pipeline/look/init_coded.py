"""What `smelt init` proposes for a model whose weights are codes already, and what it says of them."""

from __future__ import annotations

from collections.abc import Iterator

from smelt.core.data import SIMILARITY
from smelt.look.coded_model import CodedModel
from smelt.look.init_stages import Machine, Step
from smelt.look.model import ModelLook
from smelt.runtime.schemes.registry import SCHEMES

_AS_IT_IS = "onnx-codes"
_TUNED = "onnx-tuned"


def coded_steps(seen: ModelLook, machine: Machine, train: bool) -> Iterator[Step]:
    """Yield the stages that a model of codes can go through: it leaves, and trains through its codes.

    Stages that work on floats are none of them, nor is `distill`: the model would be its own teacher, from
    which it does not differ.

    Args:
        seen: the model.
        machine: what runs there.
        train: whether there are training rows.
    """
    targets = seen.coded.targets if seen.coded else []
    if "ort-cpu" in targets:
        yield Step("onnx", "{target: ort-cpu}", "what you deploy on a CPU: the codes as they are", _AS_IT_IS)
    if machine.openvino and "openvino" in targets:
        yield Step("onnx", "{target: openvino}", "the same in OpenVINO", "openvino", "model", optional=True)
    if _trains(seen, train):
        # scales that are learned start as they are stored, so that the first update sees the very codes
        how = "{epochs: 1, learning_rate: 2.0e-5, qat: {scales: lsq}}"
        why = "learns your rows through the codes; size and speed stay"
        yield Step("finetune", how, why, "tuned", "model")
        yield Step("onnx", "{target: ort-cpu}", "to deploy instead, where that gained", _TUNED)


def coded_notes(coded: CodedModel, fast: bool) -> Iterator[str]:
    """Yield what is to be known of a model of codes, without full stops; `fast`: the fast chain was asked."""
    yield (
        f"the weights are {coded.said} codes already, which are taken as they are; pruning, fewer layers,"
        f" thinner products and other codes start from floats: {coded.again}"
    )
    if fast:
        yield (
            "--fast changes nothing here, because its chains take layers and neurons out of float weights;"
            " give it the float model"
        )


def last_graph(seen: ModelLook, train: bool) -> str:
    """Return the name of the graph that a gate is put at."""
    return _TUNED if _trains(seen, train) else _AS_IT_IS


def _trains(seen: ModelLook, train: bool) -> bool:
    """Say whether there are rows to train on, and scales to learn."""
    schemes = seen.coded.schemes if seen.coded else ()
    learns = any(SCHEMES[name].learns for name in schemes)
    return train and learns and seen.task != SIMILARITY  # whose rows may have no scores to learn
