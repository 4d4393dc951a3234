"""README's journey from folders of photographs to a decision, as it is written there."""

import os
import re
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

README = (Path(__file__).parent.parent.parent / "README.md").read_text(encoding="utf-8")
# A tenth of the people, and as few steps as there are log lines.
SMALLER = {
    "--identities 240": "--identities 24",
    "--per-batch-size 64": "--per-batch-size 16",
    "--warmup-steps 50": "--warmup-steps 1",
    "--max-steps 300 --verbose 300 --frequent 100": "--max-steps 3 --verbose 3 --frequent 1",
}


def block(name):
    """Return what stands behind a mark of README, made smaller."""
    (text,) = re.findall(rf"<!-- journey: {name} -->\n```\w+\n(.*?)```", README, flags=re.DOTALL)
    for large, small in SMALLER.items():
        text = text.replace(large, small)
    return text


def steps(name):
    """Yield (command, lines that it prints) of a console block."""
    for step in re.split(r"^\$ ", block(name).replace("\\\n", ""), flags=re.MULTILINE)[1:]:
        command, *output = step.splitlines()
        yield command, output


def shape(line):
    """Forget the numbers of a line, and how they are set in columns."""
    return re.sub(r"inf|\d+([.:]\d+)*", "0", " ".join(line.split()))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a line of the shell where `dsoftmax` is installed; return the lines it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)

    def run_line(line):
        done = subprocess.run(line, shell=True, text=True, stdout=PIPE, stderr=STDOUT)
        assert done.returncode == 0, done.stdout
        return done.stdout.splitlines()

    return run_line


def test_from_photographs_to_a_decision(run):
    for command, _ in steps("draw"):
        run(command)
    Path("people/.DS_Store").write_bytes(b"x")
    for command, promised in steps("train"):
        printed = [shape(line) for line in run(command)]
        for line in promised:
            assert shape(line) in printed, (command, line)
    assert Path("mine/identities.csv").read_text().startswith("label,name,images\n0,00,12\n")
    assert Path("results.json").stat().st_size > 1000
    assert list(Path("figures").glob("*.png"))
