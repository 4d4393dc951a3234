"""The command that says what a run needs."""

import json
import shlex

import pytest

from dsoftmax.recognition.settings import parse
from dsoftmax.tools import plan
from dsoftmax.tools.planning import layouts


@pytest.fixture
def planned(capsys):
    """Return a function that runs the command and returns what it prints as JSON."""

    def run(flags):
        assert plan.main([*flags.split(), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_a_hundred_million_identities_on_many_hosts(planned):
    result = planned(
        "--network r50 --loss dsoftmax_k --num-classes 100000000 --devices gpu:8 --hosts 16 "
        "--memory 256 --device-memory 32"
    )
    run = result["run"]
    assert run["store"] == "server"  # as train.py does with sampled classes and dist_sync
    assert run["server_bytes"] == 8 * 512 * 100_000_000
    assert run["host_bytes"] == pytest.approx(run["server_bytes"] / 16, rel=0.05)
    assert run["per_step"]["rows"] == pytest.approx(100_000_000 / 64 / 16, rel=0.02)
    assert run["problem"] == ""
    assert any("labels in a .rec are float32" in line for line in result["advice"])
    assert result["calibration"] is None  # nothing to measure: there is no such GPU here
    assert run["step_seconds"] is None
    assert {one["num_classes"] for one in result["sizes"]} == set(layouts.SIZES)
    assert len(result["sizes"]) == 16  # each in four stores


def test_a_run_that_does_not_fit_gets_advice(planned):
    result = planned(
        "--network tiny --emb-size 512 --loss dsoftmax_k --num-classes 10000000 --devices cpu "
        "--memory 24 --no-calibration"
    )
    assert result["run"]["problem"] == "more than a host has"
    assert "it would with --store host --class-dtype float16" in result["advice"]


def test_all_classes_only_have_one_store(planned):
    result = planned(
        "--network tiny --loss arcface --num-classes 757000 --devices cpu --memory 9999 "
        "--no-calibration"
    )
    assert {one["store"] for one in result["sizes"]} == {"device"}
    assert any("--loss dsoftmax_k" in line for line in result["advice"])


def test_the_command_that_follows(planned):
    flags = "--network tiny --loss dsoftmax_k --devices cpu --num-classes 1000"
    for hosts in (1, 2):
        result = planned(f"{flags} --hosts {hosts} --no-calibration")
        command = shlex.split(result["command"].replace("<", "").replace(">", ""))
        start = command.index("recognition/train.py") + 1
        settings = parse(command[start:])
        assert (settings.network, settings.loss, settings.num_classes) == (
            "tiny",
            "dsoftmax_k",
            1000,
        )
        assert settings.store == result["run"]["store"]
        assert ("tools/launch.py" in command) == (hosts > 1)


def test_times_are_expected_on_cpus(planned, capsys, monkeypatch):
    speed = layouts.Speed(1e10, 1e9)
    monkeypatch.setattr(layouts, "calibrate", lambda run: layouts.Calibration(speed, 0.01))
    flags = "--network tiny --loss dsoftmax_k --per-batch-size 10 --devices cpu --memory 999"
    result = planned(f"{flags} --num-classes 64000")
    seconds = 10 * 0.01 + 1010 * 128 * (6 * 10 / 1e10 + 9 * 4 / 1e9)
    assert result["run"]["step_seconds"] == pytest.approx(seconds)
    assert plan.main(flags.split()) == 0
    text = capsys.readouterr().out
    assert "85,742 identities x 128" in text  # the default
    assert "10 GFLOP/s, 1.0 GB/s, 10.0 ms per image" in text
    assert "100,000,000" in text


@pytest.mark.parametrize(
    ("flags", "reason"),
    [("--devices gpu:8", "only CPUs are measured"), ("--no-calibration", "--no-calibration")],
)
def test_why_no_time_is_expected(flags, reason, capsys):
    assert plan.main(["--network", "tiny", "--loss", "arcface", *flags.split()]) == 0
    assert f"a step takes     ? ({reason})\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hosts 0", "--hosts must be at least 1"),
        ("--loss arcfase", "did you mean arcface"),
        ("--devices tpu", "devices are cpu, gpu"),
        ("--loss triplet", "--loss triplet has no class weights to plan for"),
    ],
)
def test_bad_flags(flags, message, capsys):
    assert plan.main([*flags.split(), "--no-calibration"]) == 2
    assert message in capsys.readouterr().err


def test_flags_of_neither_command_are_refused(capsys):
    with pytest.raises(SystemExit):
        plan.main(["--lr", "0.1"])
    assert "unrecognized arguments: --lr" in capsys.readouterr().err
