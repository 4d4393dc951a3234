"""The table of flags, and the parser made of it."""

import subprocess
import sys

import pytest

from dsoftmax import losses
from dsoftmax.losses import presets
from dsoftmax.recognition import flags
from dsoftmax.recognition.flags import FLAGS, GROUPS, Flag, build_parser
from dsoftmax.recognition.settings import parse


@pytest.mark.parametrize("given", [["--sample-rate", "2"], ["--lr-steps", "a"], ["--ckpt", "4"]])
def test_flags_that_can_not_be(given, capsys):
    with pytest.raises(SystemExit):
        parse(given)
    assert given[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag", ["--verbose", "--frequent", "--per-batch-size", "--keep", "--threads", "--lr"]
)
def test_numbers_that_can_not_be(flag):
    with pytest.raises(ValueError, match=f"{flag} must be .*, not 0"):
        parse([flag, "0"])


def test_help_lists_all_losses():
    text = build_parser().format_help()
    assert not [name for name in losses.names() if name not in text]


def test_help_needs_no_mxnet():
    """It takes a second to load."""
    code = "import sys; from dsoftmax.recognition.flags import build_parser\n"
    code += "build_parser().format_help(); print('mxnet' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_help_is_in_groups_with_examples():
    text = build_parser().format_help()
    places = [text.index(f"\n{group}:\n") for group in (*GROUPS, "examples")]
    assert places == sorted(places)
    assert "learning rate (default: 0.1)" in text


@pytest.mark.parametrize("columns", [80, 100, 240])
def test_help_fits_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    help_text, examples = build_parser().format_help().split("examples:\n")
    assert max(map(len, help_text.splitlines())) <= min(columns, 100)
    assert max(map(len, examples.splitlines())) <= 100


def test_help_says_which_losses_have_an_option(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = " ".join(build_parser().format_help().split())
    for expected in (
        "(default: 4 with sphereface; 1.5 with sphereface_r; 1 with combined)",
        "(default: 0.5 with arcface, curricularface, dsoftmax_arcface, rand_arcface; 0.3 with",
        "(default: 1/64 with dsoftmax_b, dsoftmax_k, rand_softmax, rand_arcface, hf_softmax)",
        "1 with softmax; 64 with nsoftmax, cosface, arcface, combined, adaface, magface,",
        "40 with sphereface2; 32 with any other loss",
        "inter_filter none with any loss",
        "trees 50 with hf_softmax",
        "detach False with arcface, rand_arcface",
        "normalize False with softmax; True with any other loss",
    ):
        assert expected in text
    for name in losses.names():  # every option has a flag, or is in the list at the end
        for option in losses.resolve(name).options:
            assert f"--{option.replace('_', '-')} " in text or f" {option} " in text, option


@pytest.mark.parametrize("name", losses.names())
def test_defaults_in_the_help_are_those_of_the_losses(name):
    """They are read from the source, because importing the losses takes a second."""
    assert presets.default_options(name) == losses.resolve(name).options


def test_a_flag_is_one_entry(monkeypatch):
    """The parser, the check of its range and the field of the settings come from the table."""
    for flag in FLAGS:
        assert not flag.field or hasattr(parse([]), flag.field), flag.name
    patience = Flag("patience", "log", "steps without a better score", int, 7, least=1)
    monkeypatch.setattr(flags, "FLAGS", (*FLAGS, patience))
    text = flags.build_parser().format_help()
    assert "steps without a better score (default: 7)" in text
    args = flags.build_parser().parse_args(["--patience", "0"])
    with pytest.raises(ValueError, match="--patience must be at least 1, not 0"):
        flags.check_ranges(args)
