"""The table of flags, and the parser made of it."""

import pytest

from dsoftmax import losses
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


def test_help_is_in_groups_with_examples():
    text = build_parser().format_help()
    places = [text.index(f"\n{group}:\n") for group in (*GROUPS, "examples")]
    assert places == sorted(places)
    assert "learning rate (default: 0.1)" in text


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
