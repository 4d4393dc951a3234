#!/usr/bin/env bash
# The paper's Table 2: sampling. ResNet-50 on cleaned MS-Celeb-1M (faces_emore).
#
#   CUDA_VISIBLE_DEVICES=0,1,2,3 bash recognition/table2.sh [row ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source recognition/experiments.sh

COMMON="--network r50 --dataset emore --data-dir ${DATASETS:-../datasets}/faces_emore --scale 32 \
    --lr-steps 100000,160000 --max-steps 180000"
ORDER=(b-1 b-4 b-16 b-64 b-256 k-64 rand_softmax rand_arcface hf_softmax)
declare -A FLAGS=(
    [b-1]="--loss dsoftmax_b --sample-rate 1"
    [b-4]="--loss dsoftmax_b --sample-rate 1/4"
    [b-16]="--loss dsoftmax_b --sample-rate 1/16"
    [b-64]="--loss dsoftmax_b --sample-rate 1/64"
    [b-256]="--loss dsoftmax_b --sample-rate 1/256"
    [k-64]="--loss dsoftmax_k --sample-rate 1/64"
    [rand_softmax]="--loss rand_softmax --sample-rate 1/64"
    [rand_arcface]="--loss rand_arcface --sample-rate 1/64"
    [hf_softmax]="--loss hf_softmax --sample-rate 1/64"
)
run_experiments "$@"
