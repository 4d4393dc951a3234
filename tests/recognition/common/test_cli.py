import argparse
import functools
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsoftmax.recognition.common import cli
from dsoftmax.recognition.common.cli import (
    command,
    cosine,
    image_size,
    make_parser,
    print_json,
    rate,
    some_of,
)

REPOSITORY = Path(__file__).resolve().parents[3]
COMMANDS = sorted(
    f"{path.parent.name}.{path.stem}"
    for folder in ("tools", "eval", "recognition")
    for path in (REPOSITORY / folder).glob("*.py")
    if 'if __name__ == "__main__"' in path.read_text(encoding="utf-8")
)


SLOW_LIBRARIES = ["cv2", "gluoncv", "matplotlib", "mxnet", "scipy", "sklearn"]
HELP = """
import importlib, sys
try:
    importlib.import_module(f"dsoftmax.{sys.argv[1]}").main(["--help"])
except SystemExit as stop:
    assert stop.code == 0
print([name for name in sys.argv[2:] if name in sys.modules])
"""


@pytest.fixture(scope="module")
def help_of():
    """Return a function that returns what a command prints for --help, as a list of lines."""

    @functools.lru_cache(maxsize=None)
    def run(name):
        result = subprocess.run(
            [sys.executable, "-c", HELP, name, *SLOW_LIBRARIES],
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, help_of):
    assert help_of(name)[0].startswith(f"usage: {name.split('.')[1]}")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_imports_no_slow_library(name, help_of):
    assert help_of(name)[-1] == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_every_flag_and_has_an_example(name, help_of):
    lines = help_of(name)
    assert any(line.lstrip().startswith("python ") for line in lines)
    home = "recognition.flags" if name == "recognition.train" else name
    parser = importlib.import_module(f"dsoftmax.{home}").build_parser()
    assert all(action.help for action in parser._actions)
    text = " ".join(" ".join(lines).split())
    for action in parser._actions:
        if isinstance(action.default, (int, float)) and action.default is not False:
            assert f"default: {action.default}" in text, action.dest


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


def make_greeting_parser():
    parser = make_parser("greet", "Greet somebody.")
    parser.add_argument("--name", default="you", help="whom")
    parser.add_argument("--loud", action="store_true", help="shout")
    return parser


def test_flags_are_parsed_before_libraries_are_checked(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "require", seen.extend)

    @command(parser=make_greeting_parser, needs=["mxnet", "opencv"])
    def main(args):
        seen.append(args.name)

    with pytest.raises(SystemExit):
        main(["--name"])
    assert seen == []
    assert main(["--name", "Ann"]) == 0
    assert seen == ["mxnet", "opencv", "Ann"]


def test_help_shows_defaults():
    text = make_greeting_parser().format_help()
    assert "whom (default: you)" in text
    assert "shout\n" in text


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


@pytest.mark.parametrize("text", ["0", "2", "-1/2", "1/0", "x", f"{10**400}"])
def test_bad_rate(text):
    with pytest.raises(argparse.ArgumentTypeError, match="1/64"):
        rate(text)


@pytest.mark.parametrize("text", ["-1", "0.35", "1"])
def test_cosine(text):
    assert cosine(text) == float(text)


@pytest.mark.parametrize("text", ["1.24", "-1.1", "nan", "x"])
def test_bad_cosine(text):
    with pytest.raises(argparse.ArgumentTypeError, match="squared distance"):
        cosine(text)


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("compare", ["a.jpg", "b.jpg", "--threshold"]),
        ("search", ["query", "a.jpg", "--gallery", "gallery", "--threshold"]),
        ("clean", ["--input", "faces", "--outlier-threshold"]),
        ("clean", ["--input", "faces", "--same-person-threshold"]),
        ("rec_merge", ["--include", "a,b", "--output", "c", "--param1"]),
        ("rec_merge", ["--include", "a,b", "--output", "c", "--param2"]),
    ],
)
def test_thresholds_are_cosines(command, flags, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(f"dsoftmax.tools.{command}").main([*flags, "1.24"])
    assert "a cosine is a number from -1 to 1, not '1.24'" in capsys.readouterr().err


def test_some_of():
    assert some_of(["a", "b"]) == "  a\n  b"
    assert some_of(list("abc"), most=2) == "  a\n  b\n  ... and 1 more"


@pytest.mark.parametrize(
    ("error", "printed"),
    [
        (MemoryError(), "there is not enough memory"),
        (MemoryError("no room for faces.npy"), "no room for faces.npy"),
        (EOFError(), "a file ends before it should"),
        (FileNotFoundError(2, "No such file", "none.csv"), "none.csv: No such file"),
        (
            OSError(18, "Cross-device link", "a", None, "b"),
            "[Errno 18] Cross-device link: 'a' -> 'b'",
        ),
    ],
)
def test_what_errors_say(error, printed, capsys):
    @command
    def fail(_):
        raise error

    assert fail([]) == 2
    assert f"error: {printed}\n" in capsys.readouterr().err
