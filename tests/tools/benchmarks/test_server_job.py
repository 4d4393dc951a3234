"""The head on parameter servers: what travels is counted by hand."""

import json
import math

import pytest

from dsoftmax.tools.bench_loss import main
from dsoftmax.tools.benchmarks import server_job
from dsoftmax.tools.benchmarks.loss import NETWORK_SECONDS
from dsoftmax.tools.benchmarks.server_job import PARTS, RAW_BYTES, Job, summarize
from dsoftmax.tools.benchmarks.server_report import tables

CLASSES, WIDTH, BATCH = 301, 8, 16
SMALL = ["--distributed", "--classes", str(CLASSES), "--width", str(WIDTH)]
SMALL += ["--batch-size", str(BATCH), "--warm-ups", "1", "--steps", "3"]


def test_a_job_against_one_process(tmp_path, capsys):
    # With all classes sampled a worker pulls and pushes its whole share, in every step.
    assert main([*SMALL, "--sample-rate", "1", "--json", str(tmp_path / "found.json")]) == 0
    assert capsys.readouterr().out == ""
    report = json.loads((tmp_path / "found.json").read_text())
    assert report["machine"]["mxnet"] == "1.9.1"
    found = report["distributed"]
    assert (found["name"], found["store"]) == ("dsoftmax_k", "server")
    assert (found["workers"], found["servers"]) == (2, 2)
    row = WIDTH * 4 + 8
    gathered = 2 * 3 * BATCH  # three numbers a sample, of each worker
    summed = BATCH + 2 * BATCH * WIDTH  # z_y, and its and n's gradient to the embeddings
    assert found["traffic"] == {
        "pulled": [150 * row, 151 * row],
        "pushed": [150 * row, 151 * row],
        "summed": [2 * 4 * (gathered + summed)] * 2,
    }
    assert list(found["one_process"]) == ["host", "device"]
    for times in (found, *found["one_process"].values()):
        assert 0 < times["low"] <= times["seconds"] <= times["high"]
    assert 0 < found["ratio"] < math.inf
    assert list(found["parts"]) == list(PARTS)
    assert all(0 < seconds < math.inf for seconds in found["parts"].values())
    assert set(found["fetching"]) == {"host", "server"}
    for times in found["fetching"].values():
        assert min(times["late"], times["early"]) > NETWORK_SECONDS
        assert abs(times["hidden"]) < times["late"]
    assert found["loopback"]["ratio"] > 1
    assert found["loopback"]["raw_seconds"] > 0
    assert len(found["server_bytes"]) == 2
    assert min(found["empty_bytes"], *found["server_bytes"]) > 0
    assert found["server_ratio"] == sum(found["server_bytes"]) / (2 * 4 * CLASSES * WIDTH)


def test_a_job_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(server_job, "SERVERS", 0)
    with pytest.raises(
        ValueError, match=r"has ended; (.|\n)*a whole number from 1 to 10000 is needed"
    ):
        Job(SMALL)


def turn(seconds, loopback=200.0):
    traffic = {"pulled": 20, "pushed": 20, "summed": 10}
    parts = dict.fromkeys(PARTS, 0.1)
    return {
        "host": 2.0,
        "device": 4.0,
        "steps": [{"seconds": seconds, **traffic}, {"seconds": 0.5, **traffic}],
        "parts": [parts, {**parts, "pull": 0.3}],
        "loopback": loopback,
        "raw": 2.0,
        "fetching": {
            "server": {"late": seconds, "early": seconds - 0.5},
            "host": {"late": 1.0, "early": seconds / 4},
        },
    }


def test_medians_and_tables():
    found = summarize([turn(3.0), turn(5.0), turn(4.0, 110.0)])
    assert (found["seconds"], found["low"], found["high"]) == (4.0, 3.0, 5.0)
    assert found["ratio"] == found["one_process"]["device"]["ratio"] == 2.0
    assert found["parts"] == pytest.approx({**dict.fromkeys(PARTS, 0.1), "pull": 0.2})
    assert found["traffic"]["summed"] == [10, 10]
    assert found["fetching"]["server"] == {"late": 4.0, "early": 3.5, "hidden": 0.5}
    assert found["fetching"]["host"] == {"late": 1.0, "early": 1.0, "hidden": 0.0}
    assert found["loopback"] == {"bytes": 200, "ratio": 2.0, "raw_seconds": 200 / RAW_BYTES}
    found.update(name="dsoftmax_k", workers=2, servers=2, server_ratio=1.5)
    found.update(server_bytes=[3 << 20, 4 << 20], empty_bytes=1 << 20)
    lines = [line.split() for line in tables(found).splitlines()]
    assert ["one", "process,", "store=device", "4000.0", "4000-4000", "2.00"] in lines
    assert ["2", "workers,", "2", "servers", "4000.0", "3000-5000", "2.00"] in lines
    assert ["pull", "200.0", "40%"] in lines
    assert ["2", "workers,", "2", "servers", "4000.0", "3500.0", "500.0"] in lines
    assert ["one", "process,", "store=host", "1000.0", "1000.0", "0.0"] in lines
    assert "The servers hold 3 + 4 MB, 1.50 times weights and momenta" in tables(found)


def test_a_system_that_does_not_count(monkeypatch, tmp_path):
    monkeypatch.setattr(server_job, "INTERFACES", tmp_path / "dev")
    assert math.isnan(server_job.loopback_bytes())
    (tmp_path / "dev").write_text(
        "Inter-| Receive\n face |bytes packets\n  eth0: 5 6\n    lo: 7 8\n"
    )
    assert server_job.loopback_bytes() == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plot", "k.png"], "--plot is not for --distributed"),
        (["--losses", "dsoftmax_k", "rand_softmax"], "measures one loss at a time, not 2"),
        (["--losses", "hf_softmax"], "sampled classes, as dsoftmax_k and rand_softmax, not hf_"),
        (["--losses", "dsoftmax_k:store=host"], "leave --store out"),
        (["--store", "host"], "leave --store out"),
    ],
)
def test_what_does_not_go_together(arguments, message, capsys):
    assert main([*SMALL, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_neither_without_memory_nor_by_the_launcher(monkeypatch, capsys):
    monkeypatch.setattr(server_job, "available_bytes", lambda: 2 << 30)
    assert main(SMALL) == 2
    assert "needs about 3.2 GB, and 2.1 GB are free: choose fewer" in capsys.readouterr().err
    monkeypatch.setenv("DMLC_ROLE", "worker")
    assert main(SMALL) == 2
    assert "call it without launch.py" in capsys.readouterr().err
