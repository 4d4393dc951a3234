import json

from dsoftmax.tools import bench_data

FLAGS = ["--batch-size", "4", "--threads", "2", "--rounds", "1", "--seconds", "0.02"]


def test_the_report(dataset, tmp_path, capsys):
    folder, _ = dataset(counts=(20, 20))
    path = tmp_path / "report.json"
    assert bench_data.main(["--input", str(folder), *FLAGS, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert {"mx.io.ImageRecordIter", "plain Python iterator"} < set(report)
    assert "pipeline, 2 threads" in report
    for rates in report.values():
        assert 0 < rates["low"] <= rates["median"] <= rates["high"]
    assert "40 images of" in capsys.readouterr().err


def test_the_table(dataset, capsys):
    folder, _ = dataset(counts=(20, 20))
    assert bench_data.main(["--input", str(folder), *FLAGS]) == 0
    assert "x RecordIter" in capsys.readouterr().out.splitlines()[0]


def test_too_few_images(dataset, capsys):
    folder, _ = dataset(counts=(20, 11))
    assert bench_data.main(["--input", str(folder), *FLAGS]) == 2
    assert "31 images are too few for batches of 4" in capsys.readouterr().err
