import json

import pytest

from dsoftmax import losses
from dsoftmax.tools.bench_loss import main
from dsoftmax.tools.benchmarks import loss as loss_benchmark
from dsoftmax.tools.benchmarks.loss import Bench, Contender, groups_that_fit

SMALL = ["--classes", "300", "--width", "8", "--batch-size", "16", "--sample-rate", "1/8"]
SHORT = ["--warm-ups", "1", "--steps", "3"]


def contender(loss="dsoftmax_k", **changes):
    options = {"classes": 300, "width": 8, "batch_size": 16, "sample_rate": 1 / 8, "name": loss}
    return Contender(loss, **{**options, **changes})


class InThisProcess:
    """Takes the place of `Isolated`, which has tests of its own and takes seconds to start."""

    def __init__(self, make, *arguments):
        self._instance = make(*arguments)

    def call(self, method):
        return getattr(self._instance, method)()

    def stop(self):
        pass


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr(loss_benchmark, "Isolated", InThisProcess)


def run(capsys, *arguments):
    assert main([*SMALL, *SHORT, *arguments]) == 0
    return capsys.readouterr().out


def test_tables(capsys):
    out = run(capsys, "--losses", "nsoftmax", "dsoftmax_k", "dsoftmax_k:devices=cpu:2,store=host")
    assert "K = 300, D = 8, B = 16, rate 1/8; medians of 3 steps" in out
    lines = out.splitlines()
    paper = {line.split()[0]: line.split("|")[1].split() for line in lines if "|" in line[10:]}
    assert paper["nsoftmax"] == ["3.12", "1.0", "3.96"]
    assert paper["dsoftmax_k"] == ["0.21", "14.9", "1.05"]
    costs = [line.split() for line in lines if line.startswith("dsoftmax_k:devices=cpu:2,store=h")]
    assert [len(cells) for cells in costs] == [7, 11]


def test_json_and_plot(capsys, tmp_path, in_this_process):
    arguments = ["--losses", "dsoftmax", "dsoftmax_k", "--json", str(tmp_path / "out.json")]
    arguments += ["--plot", str(tmp_path / "k.png"), "--plot-classes", "300,100"]
    run(capsys, *arguments)
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["machine"]["mxnet"] == "1.9.1"
    full, sampled = report["results"]
    assert full["rows"] == 300
    assert full["bytes_read"] == full["bytes_written"] == 2 * 4 * 300 * 8
    assert 38 < sampled["rows"] <= 38 + 16
    for result in (full, sampled):
        assert 0 < result["low"] <= result["seconds"] <= result["high"]
        assert result["floor"] == min(result["floors"].values()) > 0
        assert result["ratio"] > 0
        assert 0 <= result["sampler"] < result["seconds"]
        assert result["rebuild"] == 0
        assert result["peak_bytes"] > result["working_bytes"]
    # The number of sampled classes is fixed while the number of classes grows.
    found = [(r["name"], r["classes"], r["rows"]) for r in report["sweep"]]
    assert [(name, classes) for name, classes, _ in found] == [
        (name, classes) for classes in (100, 300) for name in ("dsoftmax", "dsoftmax_k")
    ]
    assert {rows // 38 for name, _, rows in found if name == "dsoftmax_k"} == {1}
    assert (tmp_path / "k.png").read_bytes().startswith(b"\x89PNG")


def test_a_rate_of_its_own_makes_any_loss_a_sampled_one(capsys, in_this_process, tmp_path):
    """Partial FC is `cosface:sample_rate=...`; the rate for all is one of sampled losses alone."""
    path = tmp_path / "out.json"
    run(capsys, "--losses", "cosface", "cosface:sample_rate=1/10", "--json", str(path))
    whole, sampled = json.loads(path.read_text())["results"]
    assert (whole["rows"], sampled["rows"]) == (300, 30)


def test_the_forest_is_charged_for_its_rebuilds(capsys, in_this_process):
    report = json.loads(run(capsys, "--losses", "hf_softmax", "--json"))
    (result,) = report["results"]
    assert 0 < result["rebuild"] < result["sampler"] < result["seconds"]
    out = run(capsys, "--losses", "hf_softmax")
    assert "the paper's was 90%" in out


def test_options_of_a_loss(capsys, in_this_process, monkeypatch):
    made = []
    create = losses.create
    monkeypatch.setattr(
        losses, "create", lambda *args, **options: made.append(options) or create(*args, **options)
    )
    contender = "arcface:inter_filter=0.4,negatives=classes,sample_rate=1/4"
    (result,) = json.loads(run(capsys, "--losses", contender, "--json"))["results"]
    assert result["rows"] <= 75 + 16
    assert (made[0]["inter_filter"], made[0]["sample_rate"]) == (0.4, 0.25)


@pytest.mark.parametrize("loss", losses.names())
def test_every_loss_can_be_measured(loss):
    bench = Bench(contender(loss))
    times = bench.step()
    assert times["step"] > 0
    seconds = bench.floor()
    assert set(seconds) == {"dot", "FullyConnected"}
    assert min(seconds.values()) > 0
    assert bench.head.step == 1


def test_a_rebuild_is_spread_over_the_steps_between(monkeypatch):
    bench = Bench(contender("hf_softmax"))
    first, second = bench.step(), bench.step()
    rebuild = bench.head.stats["forest_rebuild_seconds"] / bench.head.sampler.rebuild_every
    assert first["rebuild"] == second["rebuild"] == rebuild


@pytest.mark.parametrize(
    ("loss", "devices", "centres", "rows"),
    [
        ("dsoftmax", "cpu", 1, [300]),
        ("dsoftmax", "cpu:2", 1, [150, 150]),
        ("dsoftmax_b", "cpu", 1, [300]),
        ("arcface", "cpu:2", 2, [300, 300]),
    ],
)
def test_the_floor_has_the_shapes_of_the_step(loss, devices, centres, rows, monkeypatch):
    bench = Bench(contender(loss, devices=devices, options=(("subcentres", centres),)))
    bench.step()
    monkeypatch.setattr(loss_benchmark, "FLOOR_CLASSES", 70)
    bench.floor()
    batch = 2 if loss == "dsoftmax_b" else 16
    for products, expected in zip(bench._floor, rows):
        assert sum(len(weight) for _, weight, _ in products) == expected
        for embeddings, weight, logits in products:
            assert embeddings.shape == (batch, 8)
            assert logits.shape == (batch, len(weight))


def test_numbers_of_two_bytes(capsys, in_this_process):
    names = ["dsoftmax_k", "dsoftmax_k:dtype=float32", "dsoftmax_k:momentum=0", "dsoftmax"]
    out = run(capsys, "--store=host", "--dtype=bfloat16", "--json", "--losses", *names)
    results = json.loads(out)["results"]
    assert [result["dtype"] for result in results] == ["bfloat16", "float32", "bfloat16", "float32"]
    assert [result["store"] for result in results] == ["host", "host", "host", "device"]
    bytes_of_row = [result["bytes_read"] / result["rows"] for result in results]
    assert bytes_of_row == [2 * 2 * 8, 2 * 4 * 8, 2 * 8, 2 * 4 * 8]


def test_groups(monkeypatch):
    some = [contender(name=str(number)) for number in range(5)]
    need = some[0].bytes_needed
    monkeypatch.setattr(loss_benchmark, "available_bytes", lambda: 2.5 * need)
    assert [[c.name for c in group] for group in groups_that_fit(some)] == [
        ["0", "1"],
        ["2", "3"],
        ["4"],
    ]
    monkeypatch.setattr(loss_benchmark, "available_bytes", lambda: 0.5 * need)
    with pytest.raises(ValueError, match="choose fewer --classes"):
        groups_that_fit(some)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--losses", "bsoftmax"], "--losses: there is no 'bsoftmax'; legal are softmax"),
        (["--losses", "dsoftmax:cores=3"], "'cores' is none of devices, store, dtype"),
        (["--losses", "dsoftmax:devices=tpu"], "devices are cpu, gpu"),
        (["--losses", "dsoftmax_k:dtype=float16"], "which store='host' can"),
        (["--losses", "dsoftmax_k", "--distributed", "--store=host", "--dtype=float16"], "float32"),
        (["--losses", "dsoftmax:store=host"], "store='host' copies the class rows of a step"),
    ],
)
def test_wrong_flags(arguments, message, capsys, in_this_process):
    assert main([*SMALL, *SHORT, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--sample-rate", "3"], ["--plot", "k.bmp"]])
def test_flags_argparse_refuses(flags, capsys):
    with pytest.raises(SystemExit):
        main(flags)
    assert flags[0] in capsys.readouterr().err
