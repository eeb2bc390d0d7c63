#!/usr/bin/env bash
# benchmarks/gpu.sh: on a machine with an NVIDIA GPU, runs all of smelt that has never been run on one (CUDA
# training, bf16, ONNX Runtime on CUDA, TensorRT with parity and latency, also inside of ONNX Runtime,
# bitsandbytes) within 30 minutes, and writes docs/measurements/gpu.md. Without a GPU each part says what it would do; nothing is run or written.
#
#   benchmarks/gpu.sh              makes an environment in build/gpu-env first (not in the 30 minutes)
#   PYTHON=python3.12 benchmarks/gpu.sh
#   SMELT_GPU_ENV=.venv benchmarks/gpu.sh     takes an environment that is there, and installs nothing
#   benchmarks/gpu.sh --only tensorrt         one part; --minutes N: another limit
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! command -v nvidia-smi > /dev/null || ! nvidia-smi -L > /dev/null 2>&1; then
  exec "${PYTHON:-python3}" benchmarks/gpu.py --say "$@"
fi
if [ -n "${SMELT_GPU_ENV:-}" ]; then
  env=$SMELT_GPU_ENV
else
  env=build/gpu-env
  [ -x "$env/bin/pip" ] || "${PYTHON:-python3}" -m venv "$env"
  # torch from PyPI is a CUDA build on Linux; CUDA and cuDNN for ONNX Runtime come as packages too
  "$env/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt \
    -e '.[tensorrt,bitsandbytes]' 'onnxruntime-gpu[cuda,cudnn]' pytest pytest-xdist hypothesis babel
  # what the part ort-tensorrt wants; without it, it says what is missing
  if [ ! -d build/tensorrt-10/tensorrt_libs ]; then  # beside the environment, which has TensorRT 11
    "$env/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
      --target build/tensorrt-10 'tensorrt-cu13-libs==10.*' || echo "no TensorRT 10: see above"
  fi
fi
export SMELT_TENSORRT_10=${SMELT_TENSORRT_10:-$PWD/build/tensorrt-10/tensorrt_libs}
exec "$env/bin/python" benchmarks/gpu.py "$@"
