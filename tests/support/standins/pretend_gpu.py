"""A GPU that is pretended: tensors are computed on the CPU, but are said to be on `cuda:0`.

What mixes both devices raises the error that it raises with a GPU, and `torch.cuda.is_available()` is true.
Not pretended: CUDA's kernels, memory and numbers, and what torch does with devices outside of Python, such as
activations that are computed again in a backward pass.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_SAID = {
    "is_available": True, "is_initialized": True, "is_bf16_supported": True, "device_count": 1,
    "current_device": 0, "get_device_capability": (9, 0), "get_device_name": "pretended",
    "mem_get_info": (70 * 2**30, 80 * 2**30), "max_memory_allocated": 0, "memory_allocated": 0,
    "is_current_stream_capturing": False, "get_rng_state_all": [], "set_rng_state_all": None,
    "set_device": None, "manual_seed": None, "manual_seed_all": None, "synchronize": None,
    "empty_cache": None, "reset_peak_memory_stats": None, "_lazy_init": None,
}  # fmt: skip
# operators that may take tensors of both devices
_BETWEEN = {"copy_", "_to_copy", "set_", "_has_compatible_shallow_copy_type"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}  # CPU indices of GPU tensors
_storages: dict[
    int, StorageWeakRef
] = {}  # those on the GPU; weak references keep addresses from being reused


def _on_gpu(tensor: Tensor) -> bool:
    key = tensor.untyped_storage()._cdata
    if key in _storages and _storages[key].expired():
        del _storages[key]
    return key in _storages


def _place(tensor: Tensor, gpu: bool) -> Tensor:
    storage = tensor.untyped_storage()
    if gpu:
        _storages[storage._cdata] = StorageWeakRef(storage)
    else:
        _storages.pop(storage._cdata, None)
    return tensor


def _move(tensor: Tensor, gpu: bool) -> Tensor:
    return tensor if tensor.is_meta or _on_gpu(tensor) == gpu else _place(tensor.clone(), gpu)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor) and x.layout == torch.strided]


class _Operators(TorchDispatchMode):
    """Results are on the device of the operands, which must be one."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, tensors = func._schema.name.removeprefix("aten::"), _tensors((args, kwargs))
        gpu = [_on_gpu(tensor) for tensor in tensors]
        if name == "copy_" or name == "set_":
            return _place(func(*args, **kwargs or {}), gpu[0])
        if name in _INDEXING and any(gpu) and not gpu[0]:
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor")
        if name not in _INDEXING | _BETWEEN and any(gpu):
            cpu_shapes = [
                tuple(t.shape) for t, on_gpu in zip(tensors, gpu, strict=True) if not on_gpu and t.dim()
            ]
            if cpu_shapes:
                raise RuntimeError(f"{func}: operands on cuda:0 and on the CPU, of shapes {cpu_shapes}")
        result = func(*args, **kwargs or {})
        if any(gpu):
            self.counts[name] += 1
            for tensor in _tensors(result):
                _place(tensor, True)
        return result


class _Devices(TorchFunctionMode):
    """What Python asks of devices, and creates on one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        attributes = {"device": GPU, "is_cuda": True, "is_cpu": False}
        for name, value in attributes.items():
            if func == getattr(Tensor, name).__get__ and _on_gpu(args[0]):
                return value
        if func in (Tensor.numpy, Tensor.__array__) and _on_gpu(args[0]):
            raise TypeError("a tensor on cuda:0 cannot be a numpy array")
        if func is Tensor.cpu:
            return _move(args[0], False)
        if func is Tensor.cuda:
            return _move(args[0], True)
        if func is Tensor.to:
            return self._to(*args, **kwargs)
        device = kwargs.get("device")
        if device is None or torch.device(device).type == "meta":
            return func(*args, **kwargs)
        result = func(*args, **kwargs | {"device": _CPU})
        for tensor in _tensors(result):
            _place(tensor, torch.device(device).type == "cuda")
        return result

    def _to(self, tensor: Tensor, *rest: Any, **named: Any) -> Tensor:
        like = next((x for x in (*rest, named.get("other")) if isinstance(x, Tensor)), None)
        device = next((x for x in (*rest, named.get("device")) if isinstance(x, str | torch.device)), None)
        kind = next((x for x in (*rest, named.get("dtype")) if isinstance(x, torch.dtype)), None)
        if device is not None and torch.device(device).type == "meta":
            return tensor.to(*rest, **named)
        if like is not None:
            kind, device = like.dtype, GPU if _on_gpu(like) else _CPU
        copy = {"copy": True} if named.get("copy") else {}
        converted = tensor.to(kind or tensor.dtype, **copy)
        return converted if device is None else _move(converted, torch.device(device).type == "cuda")


@contextlib.contextmanager
def pretend_gpu() -> Iterator[Counter[str]]:
    """Pretend a GPU inside the context; yield the operators that ran on it.

    What is imported for the first time inside may look for a real one.
    """
    operators = _Operators()
    before = {name: getattr(torch.cuda, name) for name in _SAID}
    for name, value in _SAID.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    try:
        with _Devices(), operators:
            yield operators.counts
    finally:
        for name, function in before.items():
            setattr(torch.cuda, name, function)
        _storages.clear()
