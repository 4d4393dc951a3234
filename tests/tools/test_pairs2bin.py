import re
from collections import Counter

import cv2
import pytest

from dsoftmax.recognition.data.packs import read_pack
from dsoftmax.recognition.data.pairs import draw_pairs, make_pack, read_pairs
from dsoftmax.tools import pairs2bin


@pytest.fixture
def faces(tmp_path, jpeg):
    """Write image files; return what is in them by path."""

    def write(*names, size=(112, 112)):
        content = {}
        for name in names:
            path = tmp_path / "faces" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            content[name] = jpeg(*size)
            path.write_bytes(content[name])
        return content

    return write


@pytest.fixture
def run(tmp_path):
    def run(text, name="pairs.txt", *flags):
        (tmp_path / name).write_text(text)
        code = pairs2bin.main(
            ["--data-dir", str(tmp_path / "faces"), "--pairs", str(tmp_path / name)]
            + ["--output", str(tmp_path / "own.bin"), *flags]
        )
        return read_pack(tmp_path / "own.bin") if code == 0 else code

    return run


def check(pack, content, names, issame):
    assert [image.tobytes() for image in pack.images] == [content[name] for name in names]
    assert pack.issame.tolist() == issame


@pytest.mark.parametrize("heading", ["10\t300\n", "2\n", ""])
def test_lfw_pairs(faces, run, heading):
    content = faces("Ann_Lee/Ann_Lee_0001.jpg", "Ann_Lee/Ann_Lee_0004.jpg", "Bo/Bo_0012.png")
    pack = run(f"{heading}Ann_Lee\t1\t4\nAnn_Lee\t4\tBo\t12\n")
    names = [f"Ann_Lee/Ann_Lee_000{number}.jpg" for number in (1, 4, 4)]
    check(pack, content, [*names, "Bo/Bo_0012.png"], [True, False])


def test_pairs_label(faces, run):
    content = faces("a/1.jpg", "a/2.jpg", "b.jpg")
    pack = run("a/1.jpg a/2.jpg 1\na/1.jpg b.jpg 0\n", "pairs_label.txt")
    check(pack, content, ["a/1.jpg", "a/2.jpg", "a/1.jpg", "b.jpg"], [True, False])


@pytest.mark.parametrize("name", ["pairs.txt", "pairs_label.txt"])
def test_a_list_beside_the_images_counts(faces, tmp_path, capsys, name):
    """insightface's packers have no flag for it; drawn pairs would pass for LFW's."""
    content = faces("a/1.jpg", "a/2.jpg", "b/1.jpg")
    listed = tmp_path / "faces" / name
    listed.write_text("a/1.jpg a/2.jpg 1\na/1.jpg b/1.jpg 0\n")
    output = tmp_path / "own.bin"
    assert pairs2bin.main(["--data-dir", str(tmp_path / "faces"), "--output", str(output)]) == 0
    names = ["a/1.jpg", "a/2.jpg", "a/1.jpg", "b/1.jpg"]
    check(read_pack(output), content, names, [True, False])
    assert str(listed) in capsys.readouterr().out


@pytest.mark.parametrize("heading", ["first,second,issame\n", ""])
def test_csv(faces, run, heading):
    content = faces("my face.jpg", "b.jpg")
    pack = run(f'{heading}"my face.jpg",b.jpg,True\nb.jpg, b.jpg ,0\n', "own.csv")
    check(pack, content, ["my face.jpg", "b.jpg", "b.jpg", "b.jpg"], [True, False])


def test_sizes(faces, run):
    faces("a.jpg", "b.jpg", size=(80, 60))
    pack = run("a.jpg b.jpg 1", "pairs.txt", "--image-size", "56")
    assert pack.decode(0).shape == (56, 56, 3)


def test_pairs_that_cannot_be_read_are_told(faces, run, tmp_path, capsys):
    content = faces("a.jpg", "b.jpg")
    (tmp_path / "faces/c.jpg").write_bytes(b"no image")
    pack = run("a.jpg c.jpg 0\na.jpg b.jpg 1\nmissing.jpg b.jpg 0\n")
    check(pack, content, ["a.jpg", "b.jpg"], [True])
    output = capsys.readouterr().out
    assert "1 of 3 pairs" in output
    assert "missing.jpg: No such file or directory" in output
    assert "c.jpg: 8 bytes are no image" in output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.jpg b.jpg 1\na.jpg b.jpg maybe\n", "line 2 is none of"),
        ("a.jpg b.jpg 1\nAnn 1\n", "line 2 is none of"),
        ("a.jpg b.jpg maybe\na.jpg b.jpg 1\n", "line 1 is none of"),
        ("", "holds no pair"),
        ("one,two,same?\n", "holds no pair"),
        ("x.jpg y.jpg 1\n", "no pair could be used"),
    ],
)
def test_bad_lists(faces, run, capsys, text, message):
    faces("a.jpg", "b.jpg")
    assert run(text) == 2
    assert message in capsys.readouterr().err


def test_pairs_are_drawn_from_a_folder_of_people(faces, tmp_path):
    content = faces(*[f"{name}/{i}.jpg" for name in ("ann", "bo", "cy") for i in range(4)])
    person = {image: name.split("/")[0] for name, image in content.items()}
    flags = ["--data-dir", str(tmp_path / "faces"), "--output", str(tmp_path / "own.bin")]
    packs = []
    for more in (["--most", "20"], ["--most", "20"], ["--most", "20", "--seed", "1"], []):
        assert pairs2bin.main([*flags, *more]) == 0
        packs.append(read_pack(tmp_path / "own.bin"))
        names = [person[image.tobytes()] for image in packs[-1].images]
        pairs = list(zip(names[::2], names[1::2]))
        assert [one == other for one, other in pairs] == packs[-1].issame.tolist()
        assert len({(a.tobytes(), b.tobytes()) for a, b in zip(*[iter(packs[-1].images)] * 2)}) == (
            len(packs[-1])
        )
        assert packs[-1].issame.sum() * 2 == len(packs[-1])
    sizes = [len(pack) for pack in packs]
    assert sizes == [20, 20, 20, 36]  # three people have 18 pairs of their own
    texts = [b"".join(image.tobytes() for image in pack.images) for pack in packs]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("choice", ["0", "5"])
def test_everyone_counts_about_equally(faces, tmp_path, capsys, choice):
    """One of seven people has nearly all of the images."""
    counts = dict(zip("abcdefg", (40, 6, 6, 6, 6, 2, 1)))
    content = faces(*[f"{name}/{i}.jpg" for name, many in counts.items() for i in range(many)])
    person = {image: name.split("/")[0] for name, image in content.items()}
    flags = ["--data-dir", str(tmp_path / "faces"), "--output", str(tmp_path / "own.bin")]
    assert pairs2bin.main([*flags, "--most", "100", "--seed", choice]) == 0
    pack = read_pack(tmp_path / "own.bin")
    pairs = [(one.tobytes(), other.tobytes()) for one, other in zip(*[iter(pack.images)] * 2)]
    assert len(set(map(frozenset, pairs))) == len(pairs) == 100
    people = [(person[one], person[other]) for one, other in pairs]
    same = Counter(one for one, other in people if one == other)
    # f has one pair only; the other 49 are shared by five people
    assert sorted(same.values()) == [1, 9, 10, 10, 10, 10]
    different = Counter(name for pair in people if pair[0] != pair[1] for name in pair)
    assert set(different) == set(counts)
    assert max(different.values()) <= 21  # of 100: a seventh each, but g's 1 image and f's 2 limit
    assert re.search(
        r"50 pairs of one person, of 6 people; the largest share is [a-e]'s, 10 \(20.0 %\)",
        capsys.readouterr().out,
    )
    assert pack.people.tolist() == [list(pair) for pair in people]


def test_too_few_pairs_are_told(faces, tmp_path, caplog):
    faces("ann/1.jpg", "ann/2.jpg", "ann/3.jpg", "bo/1.jpg")
    pairs = draw_pairs(str(tmp_path / "faces"), most=10)
    assert sorted(pair.issame for pair in pairs) == [False] * 3 + [True] * 3
    assert len(set(pairs)) == 6
    assert (
        "10 pairs were asked for, but there are only 3 of one person and 3 of two: 6 were drawn"
        in caplog.text
    )
    with pytest.raises(ValueError, match="--most must be 2 or more, not 1"):
        draw_pairs(str(tmp_path / "faces"), most=1)


def test_more_people_than_pairs(faces, tmp_path, caplog):
    faces(*[f"{person}/{image}.jpg" for person in range(30) for image in range(3)], size=(8, 8))
    pairs = draw_pairs(str(tmp_path / "faces"), most=40)
    same = [pair.people[0] for pair in pairs if pair.issame]
    different = [frozenset(pair.people) for pair in pairs if not pair.issame]
    assert len(set(same)) == len(same) == 20  # nobody twice
    assert len(set(different)) == len(different) == 20
    assert not caplog.text


def test_people_of_a_pack(faces, run, tmp_path, caplog):
    faces("Ann/Ann_0001.jpg", "Ann/Ann_0004.jpg", "Bo/Bo_0012.jpg", "x.jpg")
    assert run("Ann 1 4\nAnn 4 Bo 12\n").people.tolist() == [["Ann", "Ann"], ["Ann", "Bo"]]
    assert (tmp_path / "own.people.csv").read_text() == "first,second\nAnn,Ann\nAnn,Bo\n"
    (tmp_path / "own.people.csv").write_text("first,second\nAnn,Ann\nBo,Bo\n")
    assert read_pack(tmp_path / "own.bin").people is None
    assert "own.people.csv is ignored: it does not belong to" in caplog.text
    assert run("x.jpg x.jpg 1\n").people is None  # paths do not say who it is
    assert not (tmp_path / "own.people.csv").exists()


def test_whole_photographs_are_told(faces, run, capsys):
    faces("a.jpg", size=(90, 120))
    faces("b.jpg", "c.jpg")
    run("b.jpg c.jpg 1\na.jpg b.jpg 0\na.jpg c.jpg 0\n")
    out = capsys.readouterr().out
    assert "Warning: 1 images were not 112x112" in out
    assert "a.jpg (90x120)\nA face recogniser wants aligned faces" in out


def test_what_looks_like_a_number_but_is_none(faces, run):
    content = faces("a.jpg", "b/b_0002.jpg")
    pack = run("a.jpg,b/b_0002.jpg,0\n")
    check(pack, content, ["a.jpg", "b/b_0002.jpg"], [False])
    assert run("b 2 ²\n") == 2


def test_nothing_to_draw_from(faces, tmp_path, capsys):
    faces("ann/1.jpg", "bo/1.jpg")
    flags = ["--data-dir", str(tmp_path / "faces"), "--output", str(tmp_path / "own.bin")]
    assert pairs2bin.main(flags) == 2
    assert "2 people, 0 pairs of one person" in capsys.readouterr().err


@pytest.mark.realdata
def test_real_faces_survive(real_data, tmp_path):
    """A pack unpacked to files and packed again is the same pack."""
    pack = read_pack(real_data / "lfw" / "lfw_600.bin")
    lines = []
    for pair in range(20):
        for side in (0, 1):
            name = f"{pair}_{side}.jpg"
            (tmp_path / name).write_bytes(pack.images[2 * pair + side])
        lines.append(f"{pair}_0.jpg {pair}_1.jpg {int(pack.issame[pair])}\n")
    (tmp_path / "pairs.txt").write_text("".join(lines))
    pairs = read_pairs(tmp_path / "pairs.txt", tmp_path)
    again, _, left_out, fitted = make_pack("again", pairs)
    assert left_out == fitted == []
    assert cv2.imdecode(again.images[0], 1).shape == (112, 112, 3)
    assert all((one == other).all() for one, other in zip(again.images, pack.images))
    assert again.issame.tolist() == pack.issame[:20].tolist()
