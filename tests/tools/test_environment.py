"""What a stranger meets first: environments that are missing or can't be made, the quickstart."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dsoftmax.recognition.common.gpus import Gpu
from dsoftmax.tools.benchmarks.quickstart_table import quickstart_table
from dsoftmax.tools.dispatcher import find_commands

REPOSITORY = Path(__file__).resolve().parents[2]
NEEDED = ("bash", "cat", "cksum", "dirname", "grep", "ls", "rm", "sed")
SCRIPTS = sorted(command.module for command in find_commands().values())


@pytest.fixture
def run(tmp_path):
    """Run tests/run.sh on a machine that has these programs and no others."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in NEEDED:
        os.symlink(shutil.which(name), programs / name)

    def add(name, script):
        path = programs / name
        path.write_text(f"#!{shutil.which('bash')}\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run(**environment):
        return subprocess.run(
            [str(programs / "bash"), str(REPOSITORY / "tests" / "run.sh"), "--version"],
            env={
                "PATH": str(programs),
                "DSOFTMAX_VENV": str(tmp_path / "venv"),
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )

    run.add = add
    run.venv = tmp_path / "venv"
    return run


def test_no_python_at_all(run):
    result = run()
    assert result.returncode == 1
    assert "error: no Python 3.8 to 3.11 was found" in result.stderr
    assert "no python3 at all" in result.stderr


def test_only_a_python_that_is_too_new(run):
    run.add("python3", 'if [ "$1" = --version ]; then echo Python 3.13.0; else exit 1; fi')
    result = run()
    assert result.returncode == 1
    assert "the default here is Python 3.13.0" in result.stderr


def test_a_wrong_python_by_name(run):
    result = run(PYTHON="/nowhere/python")
    assert result.returncode == 1
    assert "PYTHON=/nowhere/python is not a working Python 3.8 to 3.11" in result.stderr


def test_python_without_venv(run):
    run.add("python3.11", 'if [ "$2" = venv ]; then exit 1; fi; echo Python 3.11.0')
    result = run()
    assert result.returncode == 1
    assert "could not make a virtual environment" in result.stderr
    assert "apt install python3-venv" in result.stderr


def test_no_package_index(run):
    result = run(
        PYTHON=sys.executable,
        PIP_CONFIG_FILE=os.devnull,
        PIP_INDEX_URL="http://127.0.0.1:9/simple",  # nothing listens there
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: pip can't reach a package index")
    assert result.stderr.count("\n") == 1


def test_a_folder_that_is_no_environment_is_left_alone(run):
    run.venv.mkdir()
    (run.venv / "precious").write_text("file")
    result = run()
    assert result.returncode == 1
    assert "is not a virtual environment; it is left as it is" in result.stderr
    assert (run.venv / "precious").read_text() == "file"


CAPABILITIES = {
    "3.7": "cpu",
    "5.0": "cu112",
    "8.9": "cu112",
    "9.0": "cpu",
    "10.0": "cpu",
    "12.0\n8.6": "cu112",
}


@pytest.fixture
def extra(run):
    """Return a function that tells the extra this machine takes."""
    script = f"set -euo pipefail; source {REPOSITORY}/tools/environment.sh; mxnet_extra"

    def extra():
        path = {"PATH": str(run.venv.parent / "bin")}
        command = [shutil.which("bash"), "-c", script]
        return subprocess.run(command, env=path, capture_output=True, text=True, check=True).stdout

    return extra


def test_the_driver_chooses_the_build_of_mxnet(run, extra):
    assert extra() == "cpu\n"
    run.add("nvidia-smi", "exit 9")  # the program, but no driver behind it
    assert extra() == "cpu\n"
    run.add("nvidia-smi", '[ "$1" = -L ] && echo "GPU 0: Tesla V100"')  # an old driver
    assert extra() == "cu112\n"


@pytest.mark.parametrize(("capabilities", "expected"), CAPABILITIES.items())
def test_gpus_that_mxnet_can_use_choose_the_build(run, extra, capabilities, expected):
    run.add("nvidia-smi", f'[ "$1" = --query-gpu=compute_cap ] && echo "{capabilities}"')
    assert extra() == f"{expected}\n"
    numbers = [tuple(map(int, line.split("."))) for line in capabilities.splitlines()]
    assert any(Gpu("", pair).is_supported for pair in numbers) == (expected == "cu112")


@pytest.mark.parametrize("module", SCRIPTS)
def test_a_script_without_its_environment(module):
    script = Path(*module.split(".")[1:]).with_suffix(".py")
    result = subprocess.run(
        [sys.executable, "-S", str(script), "--help"],  # without site-packages
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: dsoftmax is not installed for {sys.executable}: run ")
    assert ". .venv/bin/activate" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("version", [(3, 7, 17), (3, 12, 1)])
def test_setup_refuses_other_versions_of_python_before_it_imports_setuptools(version):
    script = (
        f"import runpy, sys; sys.version_info = {version}; sys.modules['setuptools'] = None; "
        "runpy.run_path('setup.py')"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: dsoftmax runs on Python 3.8 to 3.11")
    assert result.stderr.count("\n") == 1


def test_the_table_of_the_quickstart():
    verified = [
        {"accuracy_flip": 0.9705, "val": {"far": 1e-3, "tar": 0.793}},
        {"accuracy_flip": 0.5, "val": {"far": 1e-3, "tar": 0.01}},
    ]
    measured = [{"loss": "dsoftmax", "seconds": 0.1279}, {"loss": "dsoftmax_k", "seconds": 0.0435}]
    header, *lines = quickstart_table(verified, measured).splitlines()
    assert header.split() == ["accuracy", "TAR", "at", "FAR", "0.001", "loss", "layer"]
    assert [line.split() for line in lines] == [
        ["D-Softmax", "97.0", "%", "79.3", "%", "127.9", "ms"],
        ["dsoftmax_k", "50.0", "%", "1.0", "%", "43.5", "ms"],
    ]
    with pytest.raises(ValueError, match="1 losses were verified and 2 were measured"):
        quickstart_table(verified[:1], measured)


@pytest.mark.slow
def test_the_quickstart(tmp_path):
    faces = ["--output", str(tmp_path / "faces"), "--identities", "40", "--images", "10"]
    faces += ["--val-identities", "20", "--pairs", "100"]
    command = [sys.executable, "-m", "dsoftmax.tools.synthetic_faces", *faces]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    result = subprocess.run(
        ["bash", "recognition/quickstart.sh", str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "QUICKSTART_STEPS": "4"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    header, *lines = (tmp_path / "table.txt").read_text().splitlines()
    assert header.split()[0] == "accuracy"
    assert [line.split()[0] for line in lines] == ["D-Softmax", "dsoftmax_k", "NormFace"]
    assert "\n".join([header, *lines]) in result.stdout
    assert "\n  . .venv/bin/activate\n  dsoftmax " in result.stdout
    assert (tmp_path / "figures" / "roc.png").exists()
