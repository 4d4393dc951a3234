# Runs the experiments named on the command line, or all; sourced by the scripts of the paper's tables.
#
#   COMMON      the flags of all experiments
#   FLAGS       the other flags of each experiment
#   ORDER       the experiments' names, in the order of the table
#
# CUDA_VISIBLE_DEVICES names the GPUs (none: the CPU), PYTHON the interpreter, DATASETS the folder of the
# datasets. The batch is about 256 for any number of GPUs. The paper does not say how long it trained:
# the steps are insightface's. A script that was stopped goes on where it was. Logs and models are in
# models/.

run_experiments() {
    local devices count name
    IFS=, read -ra devices <<<"${CUDA_VISIBLE_DEVICES:-}"
    count=$((${#devices[@]} > 0 ? ${#devices[@]} : 1))
    [ $# -gt 0 ] || set -- "${ORDER[@]}"
    for name in "$@"; do
        if [ -z "${FLAGS[$name]:-}" ]; then
            echo "error: there is no experiment $name; legal are ${ORDER[*]}" >&2
            exit 2
        fi
    done
    for name in "$@"; do
        # The flags are words, to be split.
        # shellcheck disable=SC2086
        "${PYTHON:-python}" -u recognition/train.py --per-batch-size $((256 / count)) \
            --resume auto --extra-model-name "$name" $COMMON ${FLAGS[$name]}
    done
}
