#!/usr/bin/env bash
# A first look, on a machine with nothing but Python: makes its own environment, draws the embedded
# dataset, checks it as one would check a downloaded one, and says where to look.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

OUTPUT=${1:-quickstart}

make_environment
"$VENV_PYTHON" tools/synthetic_faces.py --output "$OUTPUT" --overwrite
"$VENV_PYTHON" tools/rec_info.py --input "$OUTPUT" --plot "$OUTPUT/histogram.png"
echo "Look at $OUTPUT/sheet.png (each row is one person) and $OUTPUT/histogram.png."
