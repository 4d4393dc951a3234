#!/usr/bin/env bash
# A first look on a machine with nothing but Python: makes a virtual environment, draws the embedded
# dataset, trains a small network on it with three losses, verifies them on people they have not seen
# and lays out what they cost and what they are worth. About two minutes on two idle cores, once the
# environment is there.
#
#   bash recognition/quickstart.sh [folder]     a second call goes on where the first one was stopped
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

OUTPUT=${1:-quickstart}
STEPS=${QUICKSTART_STEPS:-500}
LOSSES=(dsoftmax dsoftmax_k nsoftmax)
SAMPLE_RATE=1/4     # of the 1,000 identities: fewer would be too few
MANY_IDENTITIES=100000

# A run of its own for each loss; more flags of train.py may follow.
train() {
    local loss=$1
    shift
    echo
    echo "Training with $loss:"
    "$VENV_PYTHON" -u recognition/train.py --network tiny --loss "$loss" --scale 16 \
        --dataset faces --data-dir "$OUTPUT/faces" --target val --image-size 56 \
        --lr-schedule cosine --warmup-steps 50 --max-steps "$STEPS" --verbose "$STEPS" --frequent 50 \
        --models-root "$OUTPUT/models" --resume auto "$@"
}

make_environment
if [ ! -f "$OUTPUT/faces/val.bin" ]; then
    # 2,000 pairs of two people: enough for a false accept rate of 1e-3
    "$VENV_PYTHON" tools/synthetic_faces.py --output "$OUTPUT/faces" --pairs 4000 --overwrite
fi

train dsoftmax
train dsoftmax_k --sample-rate "$SAMPLE_RATE"
train nsoftmax

echo
echo "Verifying all three, and measuring their loss layers:"
models=("${LOSSES[@]/#/$OUTPUT/models/tiny-}")
"$VENV_PYTHON" eval/verification.py --data-dir "$OUTPUT/faces" --target val --image-size 56 \
    --model "${models[@]/%/-faces/model,0}" --plots "$OUTPUT/figures" \
    --json "$OUTPUT/verification.json" >"$OUTPUT/verification.log"
"$VENV_PYTHON" tools/bench_loss.py --losses "${LOSSES[@]}" --classes "$MANY_IDENTITIES" --width 128 \
    --batch-size 128 --sample-rate "$SAMPLE_RATE" --warm-ups 5 --steps 10 \
    --json "$OUTPUT/loss_layer.json"

echo
"$VENV_PYTHON" -m dsoftmax.tools.benchmarks.quickstart_table \
    "$OUTPUT/verification.json" "$OUTPUT/loss_layer.json" | tee "$OUTPUT/table.txt"
cat <<TEXT

Accuracy and TAR, the share of true pairs accepted when 1 false pair in 1,000 is, are those of people
the networks have never seen; one short run each, so a difference of a percent may be chance.
The loss layer's time is that of a training step without the network, measured with 100,000 identities:
with the 1,000 of this dataset no loss costs anything worth measuring.
dsoftmax_k compares an image with a quarter of the identities only: that costs accuracy where there are
so few, and saves time where there are many (the paper samples 1/64 of 757,000).

Each run as a page to open in a browser: $OUTPUT/models/*/report.html.
Pictures: $OUTPUT/faces/sheet.png (each row is one person), $OUTPUT/figures, $OUTPUT/models/*/curves.png.
Next, in the environment that was made:

  . $(realpath --relative-to=. "$(dirname "$VENV_PYTHON")")/activate
  dsoftmax                                             # lists every command
  dsoftmax train --network tiny --loss arcface --dataset faces --data-dir $OUTPUT/faces --target val \\
      --image-size 56 --scale 16 --max-steps 500       # another loss
  dsoftmax dir2rec --input people --output mine        # a dataset of your own: one folder per person
TEXT
