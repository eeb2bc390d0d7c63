"""Open graphs in ONNX Runtime with the options that are fast and exact on this processor."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from smelt.core.errors import InputError, MissingDependencyError
from smelt.runtimes.device import NO_ORT_CUDA, gpu_index
from smelt.runtimes.float4 import has_float4, replace_float4
from smelt.runtimes.graph_walk import separate_int8_readers

REEXPORT_HINT = "Run the onnx stage again to export it."
# By default ONNX Runtime turns a blocked DequantizeLinear before a MatMul into a MatMulNBits at accuracy
# level 4: it would round activations that the graph does not round.
FLOAT_ACTIVATIONS_OPTION = ("session.qdq_matmulnbits_accuracy_level", "0")
# computes QuantizeLinear and DequantizeLinear as they are, instead of fused integer operators
SEPARATE_QDQ_OPTION = ("session.disable_quant_qdq", "1")


def cuda_provider_config(tf32: bool = False, cuda_graph: bool = False) -> tuple[str, dict[str, str]]:
    """Return ONNX Runtime's CUDA provider with its options.

    By default it multiplies float32 in TF32 on Ampere and newer, with 10 bits of fraction instead of 23
    (https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html#use_tf32), a larger error
    than the tolerance between a graph and its model.
    """
    options = {"use_tf32": str(int(tf32)), "device_id": str(gpu_index())}
    return "CUDAExecutionProvider", options | ({"enable_cuda_graph": "1"} if cuda_graph else {})


def open_onnx_session(
    path: Path,
    threads: int | None = None,
    device: str = "cpu",
    optimized: bool = True,
    tf32: bool = False,
    cuda_graph: bool = False,
) -> Any:
    """Open the graph `path`; `optimized=False` computes node by node, without constant folding.

    tf32: let matrix multiplications in float32 use TF32, on CUDA. cuda_graph: run it as a CUDA graph, see
    `smelt.runtimes.cuda_graph`.

    Raises:
        InputError: ONNX Runtime cannot read the file or does not support one of its operators.
    """
    options = session_options(threads, optimized)
    if device == "cpu":
        options.enable_mem_pattern = not _has_sizes_of_mask(path)
    providers: list[Any] = ["CPUExecutionProvider"]
    if device == "cuda":
        providers.insert(0, cuda_provider_config(tf32, cuda_graph))
    try:
        session = _open_session(path, options, providers)
    except Exception as error:  # its error classes share no base but Exception
        raise InputError(
            f"{path}: ONNX Runtime cannot load this graph: {error} {REEXPORT_HINT}", code="unopened-graph"
        ) from error
    if (
        device == "cuda" and "CUDAExecutionProvider" not in session.get_providers()
    ):  # it warns, and continues without the provider
        raise MissingDependencyError(f"{path}: {NO_ORT_CUDA}", code="no-cuda-provider")
    return session


def _has_sizes_of_mask(path: Path) -> bool:
    """Return whether sizes in a graph depend on the mask, so that memory patterns by input shape cost time.

    It is an encoder without padding, alone or in greedy search: that takes 0.95 and 0.96 of the time without
    patterns, at 8 and 32 texts in int8. With beams, one text would take 1.03 to 1.07 of the time
    (docs/measurements/loop.md#encoder-without-padding).
    """
    encoder = path.with_name("encoder_model.onnx")
    return path.stem in ("encoder_model", "generate") and encoder.is_file()


def _open_session(path: Path, options: Any, providers: list[Any]) -> Any:
    # On the CPU the fused node is slower than Add and LayerNormalization: measured on an int8 encoder of 4
    # layers, 160 rows of 256: 4.7 ms with it, 2.8 ms without; on single rows there is no difference.
    slow = [] if len(providers) > 1 else ["SkipLayerNormFusion"]
    more = {"providers": providers, "disabled_optimizers": slow}
    try:
        return onnxruntime.InferenceSession(str(path), options, **more)
    except Exception:
        import onnx

        model = onnx.load(path, load_external_data=False)
        if has_float4(model.graph):
            model = onnx.load(path)
            replace_float4(model)
            options.add_session_config_entry(*SEPARATE_QDQ_OPTION)
            return onnxruntime.InferenceSession(model.SerializeToString(), options, **more)
        if has_float8(model.graph):
            # ONNX Runtime 1.31 fuses two DequantizeLinear and a MatMul into an operator without float8
            options.add_session_config_entry(*SEPARATE_QDQ_OPTION)
            return onnxruntime.InferenceSession(str(path), options, **more)
        if not lacks_vnni(CPU_INFO):
            raise
        model = onnx.load(path)
        if not separate_int8_readers(model.graph):
            raise
        return onnxruntime.InferenceSession(model.SerializeToString(), options, **more)


def has_float8(graph: Any) -> bool:
    """Return whether an onnx.GraphProto has weights in float8 (E4M3)."""
    from onnx import TensorProto

    return any(tensor.data_type == TensorProto.FLOAT8E4M3FN for tensor in graph.initializer)


@contextlib.contextmanager
def silence_onnxruntime() -> Iterator[None]:
    """Suppress warnings of sessions that libraries open; they concern the graphs of these libraries."""
    onnxruntime.set_default_logger_severity(3)
    try:
        yield
    finally:
        onnxruntime.set_default_logger_severity(2)  # its default; the previous value cannot be read


def session_options(threads: int | None = None, optimized: bool = True) -> Any:
    """Return ONNX Runtime's options that make int8 matrix multiplications exact on this processor."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors raise an exception with the same text
    options.add_session_config_entry(*FLOAT_ACTIVATIONS_OPTION)
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if threads is not None:
        options.intra_op_num_threads = threads
    if lacks_vnni(CPU_INFO):
        # there int8 products may overflow 16 bits; this requests exact ones. With VNNI they are exact
        # anyway and this mode is slower: 21 ms instead of 10 for an int8 encoder of 288 rows
        options.add_session_config_entry("session.x64quantprecision", "1")
    return options


# of Linux with pages of 4 KiB
_HUGE_PAGE_BYTES = 2 * 2**20
_MADV_COLLAPSE = 25
# start and end of memory that is private, writable and of no file
_MEMORY_BLOCK = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(?:\[heap\])?$", re.MULTILINE)


def use_huge_pages(besides: Collection[int] = ()) -> int:
    """Move the large memory blocks of this process to huge pages where Linux can; return their bytes.

    With one row, a matrix product reads each weight once, and translating the addresses of 4 KiB pages takes
    a fifth of its time (docs/measurements/peers.md#huge-pages). glibc requests huge pages itself only in a
    process that was started with GLIBC_TUNABLES=glibc.malloc.hugetlb=1. Before Linux 6.1, and where an
    administrator has turned huge pages off, nothing is changed.

    Source: man 2 madvise, MADV_COLLAPSE; man 2 mincore.

    Args:
        besides: addresses of `full_huge_pages` that are left alone. What a process shares with the one that
            forked it would be copied.
    """
    pages = [address for address in full_huge_pages() if address not in besides]
    if not pages:
        return 0
    size_bytes = 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    for address in pages:
        arguments = ctypes.c_void_p(address), ctypes.c_size_t(_HUGE_PAGE_BYTES), _MADV_COLLAPSE
        if madvise(*arguments) == 0:
            size_bytes += _HUGE_PAGE_BYTES
        elif ctypes.get_errno() == errno.ENOMEM:
            break  # no free memory is contiguous, and each attempt would take long
    return size_bytes


def full_huge_pages() -> frozenset[int]:
    """Return the addresses of this process's memory that may be huge pages; empty where Linux has none."""
    try:
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="utf-8")
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return frozenset()
    if "[never]" in setting:
        return frozenset()
    blocks = [(int(match[1], 16), int(match[2], 16)) for match in _MEMORY_BLOCK.finditer(maps)]
    return frozenset(address for block in blocks for address in resident_addresses(*block))


def resident_addresses(start: int, end: int) -> list[int]:
    """Return the addresses of the parts of a memory block that may be huge pages.

    No page of them is untouched: a huge page would allocate untouched ones too, such as those of stacks.
    """
    first, last = -(-start // _HUGE_PAGE_BYTES), end // _HUGE_PAGE_BYTES
    if first >= last:
        return []
    is_resident = np.zeros((last - first, _HUGE_PAGE_BYTES // mmap.PAGESIZE), dtype=np.uint8)
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    if mincore(first * _HUGE_PAGE_BYTES, (last - first) * _HUGE_PAGE_BYTES, is_resident.ctypes.data):
        return []  # freed meanwhile
    full_pages = np.flatnonzero(np.all(is_resident & 1, axis=1))
    return [_HUGE_PAGE_BYTES * (first + int(index)) for index in full_pages]


CPU_INFO = Path("/proc/cpuinfo")


def lacks_vnni(cpuinfo: Path) -> bool:
    """Return whether this is an x86 processor known to lack instructions that sum int8 products in 32 bits.

    Args:
        cpuinfo: the file in which Linux lists the processor's features; unknown on other systems.
    """
    try:
        cpu_flags = set(cpuinfo.read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return False
    return "avx2" in cpu_flags and not cpu_flags & {"avx512_vnni", "avx_vnni", "amx_int8"}


def is_out_of_memory(message: str) -> bool:
    """Return whether ONNX Runtime's message means that an allocation failed."""
    return any(phrase in message for phrase in ("bad allocation", "std::bad_alloc", "Failed to allocate"))
