"""Pages of results show the numbers and pictures of their results."""

import numpy as np
import pytest

from dsoftmax.eval import verification
from dsoftmax.eval.mistakes import mistakes_json
from dsoftmax.eval.pairs import USUAL_FARS, verify
from dsoftmax.eval.result_page import sections_of, thumbnail, write_results
from dsoftmax.recognition.data.images import decode
from dsoftmax.recognition.data.packs import Pack
from tests.pages import pictures, section, texts_of


def brightness(images):
    return np.stack([images.mean(axis=(1, 2, 3)), images.std(axis=(1, 2, 3)) + 1], axis=1)


@pytest.fixture
def pack(jpeg):
    images = [np.frombuffer(jpeg(24, 48), np.uint8) for _ in range(80)]
    people = np.array([["ann", "ann"], ["<b>bo</b>", "cy & co"]] * 20)
    paths = [f"photos/{number}.jpg" for number in range(80)]
    return Pack("mine", images, np.array([True, False] * 20), paths, people)


def test_verification(pack, tmp_path):
    result = verify(brightness, pack)
    calibrations = result.calibrate(USUAL_FARS)
    entry = {
        "name": "one & two",
        **result.as_json(),
        **result.thresholds_json(calibrations),
        "mistakes": mistakes_json(result),
    }
    page = tmp_path / "page.html"
    write_results(str(page), "a model", [entry], [pack])
    shown = texts_of(page)
    assert f"{result.accuracy.mean:.2%} ± {result.accuracy.deviation:.2%}" in shown
    low, high = result.accuracy_interval()
    assert f"{low:.2%} to {high:.2%}" in shown
    assert f"{calibrations[0].point.threshold:.4f}" in shown
    assert section(page, "thresholds").count("too few pairs") == 2  # 20 pairs show no rate of 1e-2
    wrong = [np.count_nonzero(~result.is_right & (pack.issame == kind)) for kind in (True, False)]
    assert pictures(page, "hardest-mistakes") == (0, 2 * sum(min(count, 12) for count in wrong))
    assert sum(wrong) > 0
    for one in [*entry["mistakes"]["refused"][:12], *entry["mistakes"]["accepted"][:12]]:
        assert f"pair {one['pair']}, cosine {result.cosines[one['pair']]:+.3f}" in shown
        assert f"{2 * one['pair']}.jpg" in shown
        names = dict.fromkeys(pack.people[one["pair"]])
        assert " / ".join(names) in shown
    # without the pack, the pairs are named
    write_results(str(page), "a model", [entry])
    assert f"{one['pair']} ({one['cosine']:+.3f})" in section(page, "hardest-mistakes")


def test_pairs_of_one_kind_have_no_curve(pack):
    same = Pack("same", pack.images[:20], np.ones(10, bool))
    made = sections_of([{"name": "same", **verify(brightness, same).as_json()}])
    assert 'id="scores"' in made[0]
    assert "ROC" not in "".join(made)


def test_nothing_to_show():
    assert sections_of([]) == []


def test_thumbnails_keep_the_shape(jpeg):
    image = decode(np.frombuffer(jpeg(30, 60), np.uint8))[:, :, ::-1]
    assert decode(np.frombuffer(thumbnail(image), np.uint8)).shape == (84, 168, 3)


def test_the_command(tmp_path, jpeg, symbol_model, capsys):
    for person in ("ann", "bo", "cy"):
        (tmp_path / "people" / person).mkdir(parents=True)
        for number in range(3):
            (tmp_path / "people" / person / f"{number}.jpg").write_bytes(jpeg(48, 48))
    page = tmp_path / "page.html"
    flags = ["--people", tmp_path / "people", "--model", f"{symbol_model()},0", "--report", page]
    assert verification.main([*map(str, flags), "--image-size", "48"]) == 0
    out = capsys.readouterr().out
    assert f"the page is {page}" in out
    accuracy = out.split("Max of [people] is ")[1].split()[0]
    assert any(text.startswith(f"{float(accuracy):.2%} ±") for text in texts_of(page))
