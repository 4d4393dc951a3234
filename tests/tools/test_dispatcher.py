"""The installed command `dsoftmax` finds every script and runs it as Python would."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from dsoftmax.tools.dispatcher import FOLDERS, find_commands, list_commands

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    path
    for folder in FOLDERS
    for path in (REPOSITORY / folder).glob("*.py")
    if "\nif __name__ == " in path.read_text(encoding="utf-8")
)
DSOFTMAX = Path(sys.executable).with_name("dsoftmax")


def run(*words):
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)


def test_every_script_is_a_command_under_a_name_of_its_own():
    scripts = {path.stem: path for path in SCRIPTS}
    assert len(scripts) == len(SCRIPTS) >= 20
    assert {name: command.module for name, command in find_commands().items()} == {
        name: f"dsoftmax.{path.parent.name}.{name}" for name, path in scripts.items()
    }


def test_a_command_describes_itself():
    lines = list_commands(find_commands()).splitlines()
    for name, command in find_commands().items():
        docstring = ast.get_docstring(ast.parse((REPOSITORY / path_of(command)).read_text()))
        assert docstring.startswith(command.summary.split(",")[0])
        assert command.summary.endswith(".")
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert line.endswith(f"  {command.summary}")


def path_of(command):
    return Path(*command.module.split(".")[1:]).with_suffix(".py")


def test_the_list():
    for arguments in ([], ["--help"]):
        result = run(DSOFTMAX, *arguments)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout == list_commands(find_commands()) + "\n"


@pytest.mark.parametrize("name", sorted(find_commands()))
def test_help_has_the_name_that_was_typed(name):
    result = run(DSOFTMAX, name, "--help")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"usage: dsoftmax {name} [")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("rec_info", ["--input", "nowhere"]),
        ("train", ["--network", "r5000"]),
        ("verify_state", ["--nonsense"]),
        ("bench_loss", ["--losses", "nonsense"]),
    ],
)
def test_errors_and_exit_codes_are_those_of_the_script(name, arguments):
    script = REPOSITORY / path_of(find_commands()[name])
    expected, result = run(sys.executable, script, *arguments), run(DSOFTMAX, name, *arguments)
    assert expected.returncode == 2
    assert result.returncode == expected.returncode
    said = expected.stderr.replace(f"usage: {name}", f"usage: dsoftmax {name}")
    said = said.replace(f"{name}: error:", f"dsoftmax {name}: error:")
    assert result.stderr.split() == said.split()


def test_a_command_works(tmp_path):
    flags = ["--output", tmp_path, "--identities", 4, "--images", 3, "--val-identities", 10]
    result = run(DSOFTMAX, "synthetic_faces", *flags, "--pairs", 20, "--size", 32, "--threads", 2)
    assert result.returncode == 0, result.stderr
    assert "12 images of 4 identities" in result.stdout
    assert (tmp_path / "val.bin").exists()


def test_an_unknown_name():
    result = run(DSOFTMAX, "trian")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(
        "dsoftmax: error: there is no command 'trian', did you mean train? Legal are "
    )
