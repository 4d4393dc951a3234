#!/usr/bin/env bash
# A first look on a machine with nothing but Python: makes a virtual environment, draws the embedded
# dataset, trains a small network on it with D-Softmax and with NormFace's softmax (about two minutes
# each on two cores), verifies both on people they have not seen, and says where the figures are.
#
#   bash recognition/quickstart.sh [folder]     a second call goes on where the first one was stopped
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

OUTPUT=${1:-quickstart}
STEPS=${QUICKSTART_STEPS:-750}

make_environment
if [ ! -f "$OUTPUT/faces/val.bin" ]; then
    "$VENV_PYTHON" tools/synthetic_faces.py --output "$OUTPUT/faces" --overwrite
fi
"$VENV_PYTHON" tools/rec_info.py --input "$OUTPUT/faces" --plot "$OUTPUT/histogram.png"

for loss in dsoftmax nsoftmax; do
    "$VENV_PYTHON" -u recognition/train.py --network tiny --loss $loss --scale 16 \
        --dataset faces --data-dir "$OUTPUT/faces" --target val --image-size 56 \
        --lr-schedule cosine --warmup-steps 50 --max-steps "$STEPS" --verbose 250 --frequent 50 \
        --models-root "$OUTPUT/models" --resume auto
done

echo
echo "Unseen people, same person or not (raw pixels: 60 to 63 %):"
"$VENV_PYTHON" eval/verification.py --data-dir "$OUTPUT/faces" --target val --image-size 56 \
    --model "$OUTPUT/models/tiny-dsoftmax-faces/model,0" "$OUTPUT/models/tiny-nsoftmax-faces/model,0" \
    --plots "$OUTPUT/figures" --json "$OUTPUT/results.json"
for loss in dsoftmax nsoftmax; do
    cp "$OUTPUT"/models/tiny-$loss-faces/states/state-*"$STEPS"/classes.npy "$OUTPUT/$loss.npy"
done
"$VENV_PYTHON" eval/plots.py classes "$OUTPUT/dsoftmax.npy" "$OUTPUT/nsoftmax.npy" \
    --output "$OUTPUT/figures/classes.png"
echo "Look at $OUTPUT/faces/sheet.png (each row is one person), $OUTPUT/figures (ROC, scores,"
echo "cosines of class weights) and $OUTPUT/models/*/curves.png."
