import json

from dsoftmax.tools import bench_eval


def test_the_report(tmp_path, capsys):
    path = tmp_path / "report.json"
    flags = ["--probes", "20", "--distractors", "300", "--pairs", "500", "--templates", "40"]
    flags += ["--width", "16", "--rounds", "2", "--json", str(path)]
    assert bench_eval.main(flags) == 0
    report = json.loads(path.read_text())
    for part, ways in (
        ("megaface", {"ours", "floor", "loop"}),
        ("ijb", {"ours", "scores", "insightface"}),
    ):
        assert set(report[part]["seconds"]) == ways
        assert all(len(times) == 2 for times in report[part]["all_seconds"].values())
        assert all(seconds > 0 for seconds in report[part]["seconds"].values())
        assert report[part]["memory_bytes"] >= 0
    out = capsys.readouterr().out
    assert "MegaFace, 20 probes x 300 distractors x 16" in out
    assert "x its floor" in out


def test_too_much_for_the_machine(monkeypatch, capsys):
    monkeypatch.setattr(bench_eval, "available_bytes", lambda: 10**9)
    assert bench_eval.main([]) == 2
    assert "1.0 GB are free; take fewer --distractors" in capsys.readouterr().err
