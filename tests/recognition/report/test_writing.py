"""A run leaves a page that says what its files say, and training does not notice."""

import csv
import os
import shutil
import subprocess

import pytest

from dsoftmax.recognition import train
from dsoftmax.recognition.data import identities
from dsoftmax.recognition.data.identities import Named, write_identities
from dsoftmax.recognition.report import writing
from tests.pages import pictures, read_page, section, texts_of
from tests.recognition.runs import COUNTS, assert_same_state, folder_of, newest, stop_after

NASTY = '<b>&"<script>alert(1)</script>'
SECTIONS = ["verdict", "training", "images-and-their-classes", "classes", "verification"]


@pytest.fixture
def writes_report():
    return True


def sections_of(page):
    return [one.get("id") for one in read_page(page).iter("section")]


def test_numbers_are_those_of_the_files(flags, faces):
    write_identities(
        str(faces / identities.FILE_NAME),
        [Named(label, f"{NASTY} {label}", count) for label, count in enumerate(COUNTS)],
    )
    made = flags(lr=0.05, verbose=6)
    assert train.main(made) == 0
    folder = folder_of(made)
    page = folder / "report.html"
    assert sections_of(page) == [
        *SECTIONS,
        *("scores", "curves", "thresholds", "hardest-mistakes", "time-of-a-step", "settings"),
    ]
    with open(folder / "metrics.csv") as file:
        last = list(csv.DictReader(file))[-1]
    shown = texts_of(page)
    assert "12 of 12" in shown
    assert f"{float(last['loss']):.4g}" in shown
    assert f"{float(last['positive_cosine']):.3f}" in shown
    with open(folder / "verification.csv") as file:
        scores = list(csv.DictReader(file))
    assert f"{max(float(row['accuracy']) for row in scores):.2%}" in shown
    assert f"{float(scores[-1]['accuracy']):.2%} ± {float(scores[-1]['deviation']):.2%}" in shown
    assert pictures(page, "training") == (6, 0)
    assert pictures(page, "curves") == (3, 0)
    assert pictures(page, "classes") == (1, 10 * 2 * 2)  # all pairs of 5 classes
    assert f"{NASTY} 3 (class 3)" in shown  # as people call themselves
    assert "all 5 classes were compared" in section(page, "classes")
    assert "43 of 43 training images" in section(page, "images-and-their-classes")
    changed = section(page, "settings")
    assert "lr 0.05 0.1" in changed
    assert "embedding_size 8 128" in changed
    assert page.stat().st_size < 5_000_000
    assert not list(folder.rglob("*.part"))


def test_sampled_classes_without_a_pack(flags):
    made = flags(loss="dsoftmax_k", sample_rate=0.3, target="none", num_classes=40)
    assert train.main(made) == 0
    page = folder_of(made) / "report.html"
    assert "age-of-class-rows" in sections_of(page)
    assert "A step updates" in section(page, "age-of-class-rows")
    assert "There was none" in section(page, "verification")
    assert "scores" not in sections_of(page)


def test_triplets_have_no_classes(flags, capsys):
    made = flags(loss="triplet", per_batch_size=6, frequent=1)
    assert train.main(made) == 0
    assert "left out" not in capsys.readouterr().out
    page = folder_of(made) / "report.html"
    assert sections_of(page)[:3] == ["verdict", "training", "verification"]
    assert "triplets have the positive nearer" in section(page, "verdict")
    assert "nearer to its positive" in section(page, "training")
    assert not any(" class" in section(page, one) for one in ("verdict", "training"))


def test_a_run_that_diverges(flags, capsys):
    made = flags(lr=1e30, max_steps=40, verbose=1000, target="none")
    assert train.main(made) == 2
    page = folder_of(made) / "report.html"
    assert "Diverged at step" in section(page, "verdict")
    assert "No state was saved yet" in section(page, "classes")


def test_stopped_and_resumed(flags):
    made = flags(verbose=100, target="none")
    stop_after(8, made)
    page = folder_of(made) / "report.html"
    assert "8 of 12" in texts_of(page)
    assert "Go on with --resume." in texts_of(page)
    assert train.main([*made, "--resume"]) == 0
    assert "12 of 12" in texts_of(page)


def test_a_report_that_fails_does_not_end_a_run(flags, monkeypatch, capsys):
    def fail(*_, **__):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(writing, "write_report", fail)
    made = flags()
    assert train.main(made) == 0
    assert "report.html was not written: two lines\n" in capsys.readouterr().out


def test_a_section_that_fails_leaves_the_others(flags, monkeypatch, capsys):
    monkeypatch.setattr("dsoftmax.recognition.report.measures.ROWS_AT_ONCE", 0)
    made = flags(max_steps=2)
    assert train.main(made) == 0
    assert "Classes is left out of " in capsys.readouterr().out
    page = folder_of(made) / "report.html"
    assert "This can't be shown" in section(page, "classes")
    assert pictures(page, "curves") == (3, 0)


@pytest.mark.parametrize("options", [{}, {"loss": "dsoftmax_k", "sample_rate": 0.5}])
def test_training_does_not_notice(flags, monkeypatch, options):
    made = [flags(name, **options) for name in ("with", "without")]
    assert train.main(made[0]) == 0
    monkeypatch.setattr(writing.RunReport, "write", lambda *_, **__: None)
    monkeypatch.setattr("dsoftmax.recognition.step_times.MEASURED_STEPS", 0)
    assert train.main(made[1]) == 0
    assert (folder_of(made[0]) / "report.html").exists()
    assert not (folder_of(made[1]) / "report.html").exists()
    assert_same_state(*(newest(one) for one in made))


BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.mark.slow
def test_a_browser_shows_it_without_a_complaint(flags, tmp_path):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    made = flags(loss="dsoftmax_k", sample_rate=0.3, num_classes=40)
    assert train.main(made) == 0
    text = (folder_of(made) / "report.html").read_text(encoding="utf-8")
    check = (
        "<script>addEventListener('load', () => { const all = [...document.images], "
        "page = document.documentElement; "
        "document.title = all.filter(one => one.naturalWidth).length + ' of ' + all.length + "
        "' images, ' + (page.scrollWidth - page.clientWidth) + ' too wide' })"
        "</script></body>"
    )
    (tmp_path / "checked.html").write_text(text.replace("</body>", check), encoding="utf-8")
    flags_of_browser = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
        "--disable-background-networking --disable-component-update --enable-logging=stderr "
        f"--dump-dom --window-size=600,900 --user-data-dir={tmp_path / 'profile'}"
    ).split()
    done = subprocess.run(
        [browser, *flags_of_browser, f"file://{tmp_path / 'checked.html'}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    count = text.count("<img ")
    assert f"<title>{count} of {count} images, 0 too wide</title>" in done.stdout
    assert "CONSOLE" not in done.stderr
