#!/usr/bin/env bash
# The paper's Table 3: 757,000 identities, MS-Celeb-1M and MegaFace2 joined (tools/rec_merge.py). The
# sampled losses keep the class weights in the host's memory, which takes 3.1 GB there.
#
#   CUDA_VISIBLE_DEVICES=0,1,2,3 bash recognition/table3.sh [row ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source recognition/experiments.sh

COMMON="--network r50 --dataset massive --data-dir ${DATASETS:-../datasets}/faces_massive --scale 32 \
    --lr-steps 160000,260000 --max-steps 290000"
ORDER=(softmax rand_softmax hf_softmax dsoftmax_k)
declare -A FLAGS=(
    [softmax]="--loss nsoftmax --class-parallel --chunk 65536"
    [rand_softmax]="--loss rand_softmax --sample-rate 1/64 --store host"
    [hf_softmax]="--loss hf_softmax --sample-rate 1/64 --store host"
    [dsoftmax_k]="--loss dsoftmax_k --sample-rate 1/64 --store host"
)
run_experiments "$@"
