"""The commands of a reproduction with the paper's datasets, for who has them and GPUs."""

from __future__ import annotations

from typing import Sequence

# What a table's script trains, and the folder of a row's model.
SCRIPTS = {
    "table1": ("recognition/table1.sh", "emore"),
    "table2": ("recognition/table2.sh", "emore"),
    "table3": ("recognition/table3.sh", "massive"),
}
PACKS = "lfw,cfp_fp,agedb_30"


def commands(targets: Sequence[str]) -> str:
    """Return the commands, from training to the figures of each row."""
    lines = [
        "# The datasets are described in recognition/README.md and eval/README.md.",
        "export CUDA_VISIBLE_DEVICES=0,1,2,3 DATASETS=../datasets",
    ]
    for target in targets:
        if target not in SCRIPTS:
            continue
        script, dataset = SCRIPTS[target]
        lines += [
            f"\n# {target}",
            f"bash {script}",
            f"for model in models/r50-*-{dataset}-*/model; do",
            f"    python eval/verification.py --data-dir $DATASETS/faces_emore --target {PACKS} \\",
            "        --model $model,0 --json $(dirname $model)/verification.json",
            "    python eval/ijb.py --target IJBC --data-dir $DATASETS/IJBC --model $model,0 \\",
            "        --result-dir $(dirname $model)/ijbc --json $(dirname $model)/ijbc.json",
            "    python eval/megaface.py --model $model,0 --algo mine \\",
            *(
                f"        --{kind}-lst $DATASETS/megaface/{kind}_lst \\\n"
                f"        --{kind}-root $DATASETS/megaface/{kind}_images \\\n"
                f"        --{kind}-noises $DATASETS/megaface/{kind}_noises.txt \\"
                for kind in ("facescrub", "megaface")
            ),
            "        --output $(dirname $model)/megaface --json $(dirname $model)/megaface.json",
            "done",
        ]
    if "table3" in targets:
        lines += ["\n# the time of a step of the loss", "python tools/bench_loss.py"]
    return "\n".join(lines)
