#!/usr/bin/env bash
# The paper's Table 1: losses and values of d. ResNet-50 on cleaned MS-Celeb-1M (faces_emore).
#
#   CUDA_VISIBLE_DEVICES=0,1,2,3 bash recognition/table1.sh                   all of it
#   CUDA_VISIBLE_DEVICES=0,1,2,3 bash recognition/table1.sh dsoftmax-0.9      one row
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source recognition/experiments.sh

COMMON="--network r50 --dataset emore --data-dir ${DATASETS:-../datasets}/faces_emore --scale 32 \
    --lr-steps 100000,160000 --max-steps 180000"
ORDER=(softmax sphereface arcface dsoftmax-0.5 dsoftmax-0.7 dsoftmax-0.9 dsoftmax-1.0
    dsoftmax_softmax dsoftmax_arcface)
declare -A FLAGS=(
    [softmax]="--loss nsoftmax"
    [sphereface]="--loss sphereface --m1 4"
    [arcface]="--loss arcface --m2 0.5"
    [dsoftmax-0.5]="--loss dsoftmax --d 0.5"
    [dsoftmax-0.7]="--loss dsoftmax --d 0.7"
    [dsoftmax-0.9]="--loss dsoftmax --d 0.9"
    [dsoftmax-1.0]="--loss dsoftmax --d 1.0"
    [dsoftmax_softmax]="--loss dsoftmax_softmax --d 0.9"
    [dsoftmax_arcface]="--loss dsoftmax_arcface --d 0.9"
)
run_experiments "$@"
