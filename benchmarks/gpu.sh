#!/usr/bin/env bash
# benchmarks/gpu.sh: on a machine with an NVIDIA GPU, runs what of smelt has never run on one, in at most nine
# minutes: PyTorch on CUDA first, then ONNX Runtime on CUDA, then TensorRT where it is installed. Each part writes
# its result at once into build/gpu/results (and $OUT, if that is set); a second start goes on with the parts
# that are missing. What succeeded is recorded in benchmarks/gpu-runs.json, of which `make docs` makes the table
# in docs/reference/not-run.md. Without a GPU it only says what each part would do.
#
#   benchmarks/gpu.sh                          with the Python of PYTHON (default: .venv's, else python3)
#   benchmarks/gpu.sh --only tensorrt          one part; --minutes N: another limit
#   benchmarks/gpu.sh --rehearse               on the CPU: the same commands, nothing is recorded; TensorRT's engines
#                                              are built where the tests can build them, and not run
#
# The machine needs torch and transformers, and no network: where smelt is not installed, its other packages are
# carried there. On a machine with network, with the same version of Python:
#
#   python benchmarks/gpu_packages.py pack --python 3.12
#
# writes build/gpu/parts, files of at most 60 MB, to copy with the checkout (`base.*` for PyTorch, `onnxruntime.*`
# for ONNX Runtime). TensorRT's 2 GB are not carried: pip install 'smelt[tensorrt]' where there is network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
if [ -f build/gpu/parts/index.json ]; then
  site=$("$PYTHON" benchmarks/gpu_packages.py unpack)
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
export SMELT_TENSORRT_10=${SMELT_TENSORRT_10:-$PWD/build/tensorrt-10/tensorrt_libs}
exec "$PYTHON" benchmarks/gpu.py "$@"
