import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsoftmax.recognition.common.cli import command, image_size, print_json, rate, some_of

REPOSITORY = Path(__file__).resolve().parents[3]
COMMANDS = sorted(
    f"{path.parent.name}.{path.stem}"
    for folder in ("tools", "eval", "recognition")
    for path in (REPOSITORY / folder).glob("*.py")
    if 'if __name__ == "__main__"' in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"dsoftmax.{name}").main(["--help"])
    assert stop.value.code == 0
    assert f"usage: {name.split('.')[1]}" in capsys.readouterr().out


def test_commands_are_found():
    assert {"tools.dir2rec", "eval.verification", "recognition.train"} <= set(COMMANDS)


@pytest.mark.parametrize("how", [["tools/rec_info.py"], ["-m", "dsoftmax.tools.rec_info"]])
def test_both_ways_to_call(how):
    result = subprocess.run(
        [sys.executable, *how, "--input", "nowhere"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    message = "rec_info: error: nowhere: there is no such folder or .rec file\n"
    assert result.stderr == message


def test_expected_failures_are_one_line(capsys):
    @command
    def main(argv=None):
        raise argv

    for error in (ValueError("bad flag"), FileNotFoundError("no file"), ImportError("no extra")):
        assert main(error) == 2
        assert capsys.readouterr().err.endswith(f"error: {error}\n")
    with pytest.raises(ZeroDivisionError):
        main(ZeroDivisionError())
    assert main(KeyboardInterrupt()) == 130


@pytest.mark.parametrize(("text", "size"), [("112,96", (112, 96)), ("56", (56, 56))])
def test_image_size(text, size):
    assert image_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "1,2,3", "a,b", "-1,5", "99999"])
def test_bad_image_size(text):
    with pytest.raises(argparse.ArgumentTypeError, match="height,width like 112,112"):
        image_size(text)


def test_json_has_no_nan(capsys):
    print_json({"a": [float("nan"), 1.5], "b": (float("inf"), "x")}, "-")
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": [None, "x"]}


@pytest.mark.parametrize(("text", "value"), [("1/64", 1 / 64), ("0.5", 0.5), ("1", 1)])
def test_rate(text, value):
    assert rate(text) == value


@pytest.mark.parametrize("text", ["0", "2", "-1/2", "1/0", "x"])
def test_bad_rate(text):
    with pytest.raises(argparse.ArgumentTypeError, match="1/64"):
        rate(text)


def test_some_of():
    assert some_of(["a", "b"]) == "  a\n  b"
    assert some_of(list("abc"), most=2) == "  a\n  b\n  ... and 1 more"
