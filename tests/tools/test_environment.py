"""The scripts that make their own environment say in a sentence why they can't."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
NEEDED = ("bash", "cat", "cksum", "dirname", "grep", "ls", "sed")


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


def test_a_folder_that_is_no_environment_is_left_alone(run):
    run.venv.mkdir()
    (run.venv / "precious").write_text("file")
    result = run()
    assert result.returncode == 1
    assert "is not a virtual environment; it is left as it is" in result.stderr
    assert (run.venv / "precious").read_text() == "file"


def test_the_driver_chooses_the_build_of_mxnet(run):
    script = f"source {REPOSITORY}/tools/environment.sh; mxnet_extra"

    def extra():
        path = {"PATH": str(run.venv.parent / "bin")}
        command = [shutil.which("bash"), "-c", script]
        return subprocess.run(command, env=path, capture_output=True, text=True, check=True).stdout

    assert extra() == "cpu\n"
    run.add("nvidia-smi", "exit 9")  # the program, but no driver behind it
    assert extra() == "cpu\n"
    run.add("nvidia-smi", 'echo "GPU 0: Tesla V100"')
    assert extra() == "cu112\n"
