# Sourced by the scripts that must work on a machine with nothing but Python: makes .venv in the
# repository, installs dsoftmax there and sets VENV_PYTHON. A second call finds the work done.
#
#   source tools/environment.sh; make_environment
#
# PYTHON=/path/to/python chooses the interpreter; DSOFTMAX_VENV=/path the environment's folder.

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
    echo "error: $*" >&2
    exit 1
}

is_supported_python() {
    "$1" -c 'import sys; sys.exit(not (3, 8) <= sys.version_info[:2] <= (3, 11))' 2>/dev/null
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        is_supported_python "$PYTHON" || fail "PYTHON=$PYTHON is not a working Python 3.8 to 3.11," \
            "the versions MXNet 1.9.1 runs on."
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.10 python3.9 python3.8 python3 python; do
        if command -v "$candidate" >/dev/null && is_supported_python "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.8 to 3.11 was found (MXNet 1.9.1 runs on no other; the default here is" \
        "$(python3 --version 2>/dev/null || echo 'no python3 at all')). Install one, for instance" \
        "python3.11 by your system's package manager or pyenv, or name it: PYTHON=/path/to/python."
}

# mxnet and mxnet-cu112 overwrite each other's files: the machine's GPUs decide which one. The wheel
# runs on compute capabilities 5.0 to 8.9, as recognition/common/gpus.py says in more words.
mxnet_extra() {
    local capabilities
    if ! command -v nvidia-smi >/dev/null; then
        echo cpu
    elif capabilities=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null); then
        grep -q '^ *[5-8]\.' <<<"$capabilities" && echo cu112 || echo cpu
    else # no driver, or one too old to know capabilities, and so too old for GPUs above 8.9
        nvidia-smi -L 2>/dev/null | grep -q GPU && echo cu112 || echo cpu
    fi
}

# Fetches a small package that dsoftmax needs anyway: without an index pip would retry for a minute.
can_reach_packages() {
    local fetched=${VENV_PYTHON%/bin/python}/fetched
    "$VENV_PYTHON" -m pip --retries 0 --timeout 15 download --quiet --no-deps --dest "$fetched" \
        tqdm >/dev/null 2>&1 && rm -r "$fetched"
}

# The versions that were tested with this Python; none of CUDA's libraries, which were not.
constraints() {
    "$VENV_PYTHON" -c 'import sys; print("{}/python{}.{}.txt".format(sys.argv[1], *sys.version_info))' \
        "$REPOSITORY/tools/constraints"
}

make_environment() {
    local venv=${DSOFTMAX_VENV:-$REPOSITORY/.venv}
    local extras stamp
    extras=$(mxnet_extra),test
    VENV_PYTHON=$venv/bin/python
    # What is installed is a function of these; the finished environment carries their sum.
    stamp=$({
        echo "$REPOSITORY $extras"
        cat "$REPOSITORY"/{setup.py,tools/environment.sh,tools/constraints/*.txt}
    } | cksum)
    if [ "$(cat "$venv/dsoftmax-stamp" 2>/dev/null)" = "$stamp" ] && "$VENV_PYTHON" -c ''; then
        return
    fi
    if [ -n "$(ls -A "$venv" 2>/dev/null)" ] && [ ! -f "$venv/pyvenv.cfg" ]; then
        fail "$venv holds something that is not a virtual environment; it is left as it is."
    fi

    local python
    python=$(find_python) || exit 1
    echo "Making an environment with $("$python" --version) in $venv (a few minutes, once) ..."
    "$python" -m venv --clear "$venv" || fail "$python could not make a virtual environment." \
        "On Debian and Ubuntu: apt install python3-venv (or python3.11-venv and so on)."
    can_reach_packages || fail "pip can't reach a package index, so nothing can be installed: is" \
        "this machine online? PIP_INDEX_URL=https://... names a mirror."
    "$VENV_PYTHON" -m pip install --quiet --upgrade "pip>=22,<26" ||
        fail "pip could not be upgraded; its own lines above say why."
    "$VENV_PYTHON" -m pip install --compile --constraint "$(constraints)" \
        --editable "$REPOSITORY[$extras]" ||
        fail "the installation of dsoftmax[$extras] failed; pip's own lines above say why. It took" \
            "the versions of $(constraints); pip install -e '.[$extras]' takes any that work."
    # opencv-python links libGL, which a server often lacks; its headless twin does not.
    if ! "$VENV_PYTHON" -c 'import cv2' 2>/dev/null; then
        echo "This machine lacks the graphics libraries of opencv-python: taking its headless twin."
        local version
        version=$("$VENV_PYTHON" -m pip show opencv-python | sed -n 's/^Version: //p')
        "$VENV_PYTHON" -m pip uninstall --quiet --yes opencv-python &&
            "$VENV_PYTHON" -m pip install --quiet --no-deps "opencv-python-headless==$version" ||
            fail "opencv-python-headless could not be installed either."
    fi
    "$VENV_PYTHON" -m dsoftmax.tools.preflight || exit 1
    "$VENV_PYTHON" -m dsoftmax.tools.build_operators >/dev/null ||
        echo "Going on without these optional operators: steps on the CPU will be slower."
    echo "$stamp" >"$venv/dsoftmax-stamp"
}
