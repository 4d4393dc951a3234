#!/usr/bin/env bash
# Runs tests with the CUDA build of MXNet on the CPU: all that can be tried of it without a GPU.
#
#   bash tests/run_cu112.sh                   losses, common and eval
#   bash tests/run_cu112.sh tests/losses -x   any of pytest's arguments
#
# The environment takes 5 GB, in the folder that DSOFTMAX_CU112 names (build/cu112 by default). Where
# there is no NVIDIA driver, which that build links, a library takes its place that has no device.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

FOLDER=${DSOFTMAX_CU112:-$REPOSITORY/build/cu112}
DSOFTMAX_VENV=$FOLDER/venv

mxnet_extra() { # instead of asking for a GPU
    echo cu112
}

# The functions that libmxnet.so links, and those that programs ask first. Each answers 100,
# CUDA_ERROR_NO_DEVICE.
make_driver() {
    local name
    for name in cuInit cuDriverGetVersion cuDeviceGetCount cuDeviceGet cuDevicePrimaryCtxRetain \
        cuGetErrorString cuGraphKernelNodeGetParams cuGraphNodeGetType cuLaunchKernel \
        cuModuleGetFunction cuModuleLoadData cuModuleLoadDataEx cuModuleUnload; do
        echo "int $name(void) { return 100; }"
    done | cc -shared -fPIC -x c -o "$1" -
}

if ! "$(find_python)" -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2>/dev/null; then
    mkdir -p "$FOLDER/driver"
    make_driver "$FOLDER/driver/libcuda.so.1"
    export LD_LIBRARY_PATH=$FOLDER/driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
make_environment
# The tests import MXNet before dsoftmax, which would find CUDA's libraries for it.
for library in "$DSOFTMAX_VENV"/lib/python3.*/site-packages/nvidia/*/lib; do
    LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$library
done
export LD_LIBRARY_PATH
[ $# -gt 0 ] || set -- tests/losses tests/recognition/common tests/eval
CUDA_VISIBLE_DEVICES='' exec "$VENV_PYTHON" -m pytest "$@"
