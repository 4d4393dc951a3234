"""Templates against the protocol spelled out, with every switch both ways."""

import itertools

import numpy as np
import pytest

from dsoftmax.eval import templates
from dsoftmax.eval.templates import Members, Pairs, Templates


def naive_templates(views, scores, members, flip, norm, detector):
    """Average the faces of a medium, then the media, one by one."""
    pooled = {}
    for template in set(members.templates.tolist()):
        media = {}
        for face, own, medium in zip(*members):
            if own != template or not views[face].any():
                continue
            feature = views[face][0] + (views[face][1] if flip else 0)
            if not norm:
                feature = feature / np.linalg.norm(feature)
            if detector:
                feature = feature * scores[face]
            media.setdefault(medium, []).append(feature)
        total = sum((np.mean(faces, axis=0) for faces in media.values()), np.zeros(views.shape[2]))
        pooled[template] = total / (np.linalg.norm(total) or 1)
    return pooled


@pytest.fixture
def faces(rng):
    """Make features, detector scores, and members of templates in random order."""
    count = 120
    views = rng.normal(size=(count, 2, 9)).astype(np.float32) + 1
    views[[3, 17, 18]] = 0  # could not be read
    scores = rng.uniform(0.2, 1, count).astype(np.float32)
    members = Members(
        rng.integers(0, count, 300), rng.choice([5, 7, 40, 41, 900], 300), rng.integers(0, 12, 300)
    )
    return views, scores, members


@pytest.mark.parametrize("switches", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("rows", [16, 8192])
def test_pooling(faces, switches, rows, monkeypatch):
    monkeypatch.setattr(templates, "ROWS_PER_BLOCK", rows)
    expected = naive_templates(*faces, *switches)
    found = templates.pool(*faces, *switches)
    assert found.ids.tolist() == sorted(expected)
    for template, feature in zip(*found):
        np.testing.assert_allclose(feature, expected[template], atol=1e-5)


def test_every_switch_matters(faces):
    found = [
        templates.pool(*faces, *switches).features.round(5).tobytes()
        for switches in itertools.product([False, True], repeat=3)
    ]
    assert len(set(found)) == 8


def test_media_are_averaged_before_templates():
    """A video of a hundred frames weighs as much as one photo."""
    views = np.repeat(np.eye(2, dtype=np.float32)[:, None], 2, axis=1)
    members = Members(np.array([0] + [1] * 100), np.zeros(101, int), np.array([1] + [2] * 100))
    found = templates.pool(views, np.ones(2), members)
    np.testing.assert_allclose(found.features[0], [np.sqrt(0.5)] * 2, rtol=1e-5)


def test_features_without_mirror_images(faces):
    views, scores, members = faces
    found = templates.pool(views[:, :1], scores, members, flip=True)
    np.testing.assert_allclose(
        found.features, templates.pool(views, scores, members, flip=False).features
    )


def test_nan_is_refused(faces):
    views, scores, members = faces
    views[members.faces[0], 1, 2] = np.nan
    with pytest.raises(ValueError, match=f"the feature of face {members.faces[0]} holds NaN"):
        templates.pool(views, scores, members)


class TestPairScores:
    @pytest.mark.parametrize("threads", [1, 3])
    def test_against_one_by_one(self, rng, threads, monkeypatch):
        monkeypatch.setattr(templates, "PAIRS_PER_BLOCK", 7)
        ids = np.array([3, 8, 9, 20])
        features = templates.pool(
            rng.normal(size=(4, 2, 5)), np.ones(4), Members(np.arange(4), ids, ids)
        ).features
        features[2] = 0
        first, second = rng.choice(ids, 50), rng.choice(ids, 50)
        pairs = Pairs(first.astype(np.int32), second.astype(np.int32), np.zeros(50, bool))
        found = templates.pair_scores(Templates(ids, features), pairs, threads)
        for score, one, other in zip(found, first, second):
            expected = features[ids == one][0] @ features[ids == other][0]
            assert score == pytest.approx(-1 if 9 in (one, other) else expected, abs=1e-6)

    @pytest.mark.parametrize("stranger", [1, 5, 99])
    def test_unknown_templates(self, stranger):
        pairs = Pairs(np.array([3, stranger], np.int32), np.array([3, 3], np.int32), np.ones(2))
        known = Templates(np.array([3, 8]), np.ones((2, 4), np.float32))
        with pytest.raises(ValueError, match=f"the list of pairs: template {stranger} has no face"):
            templates.pair_scores(known, pairs)


def members_of_a(path):
    return templates.read_members(path, ["a"])


class TestFiles:
    @pytest.fixture
    def write(self, tmp_path):
        def write(text):
            (tmp_path / "file").write_text(text)
            return str(tmp_path / "file")

        return write

    def test_faces(self, write):
        found = templates.read_faces(write("1.jpg 1 2 3 4 5 6 7 8 9 10 0.5\nb.jpg" + " 0" * 11))
        assert found.names == ["1.jpg", "b.jpg"]
        assert found.landmarks[0].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
        assert found.scores.tolist() == [0.5, 0]

    def test_members(self, write):
        found = templates.read_members(write("b 7 1\na 8 2\nb 8 3\n"), ["a", "b"])
        assert [part.tolist() for part in found] == [[1, 0, 1], [7, 8, 8], [1, 2, 3]]

    def test_pairs(self, write):
        found = templates.read_pairs(write("1 2 1\n3 4 0\n"))
        assert [part.tolist() for part in found[:3]] == [[1, 3], [2, 4], [True, False]]

    def test_people(self, write):
        found = templates.read_people(write("TEMPLATE_ID,SUBJECT_ID,X\n5,100,a\n5,100,b\n6,9,c\n"))
        assert [part.tolist() for part in found] == [[5, 6], [100, 9]]

    @pytest.mark.parametrize(
        ("read", "text", "message"),
        [
            (templates.read_faces, "a 1 2", "line 1 is not `name x1 y1"),
            (templates.read_faces, "a" + " x" * 11, "line 1 is not `name x1 y1"),
            (templates.read_faces, "", "the file is empty"),
            (lambda path: templates.read_members(path, ["a"]), "a 1 x", "line 1 is not `name"),
            (
                lambda path: templates.read_members(path, ["a"]),
                "a 1 1\nb 1 1",
                "line 2: 'b' is not",
            ),
            (lambda path: templates.read_members(path, ["a"]), "", "the file is empty"),
            (templates.read_pairs, "1 2 1\n3 4\n", "its lines are not"),
            (templates.read_pairs, "1 2 2\n", "its lines are not"),
            (templates.read_pairs, "1 2 1\n3 x 0\n", "its lines are not"),
            (templates.read_pairs, "", "its lines are not"),
            (templates.read_people, "a,b\n1,2\n1,3\n", "line 3: template 1 shows 3, but 2 in"),
            (templates.read_people, "a,b\n1,x\n", "line 2 is not `template,subject"),
            (templates.read_people, "a,b\n", "holds no template"),
        ],
    )
    def test_bad_files_are_named(self, write, read, text, message):
        with pytest.raises(ValueError, match=message) as caught:
            read(write(text))
        assert "file" in str(caught.value)
