"""Each figure against a loop over single pairs."""

import numpy as np
import pytest

from dsoftmax.tools.reproduction import measures


@pytest.fixture
def faces(rng):
    """Return embeddings of 20 people with 2 to 5 images each, who they show, and distractors."""
    people = np.repeat(np.arange(20) * 3, rng.integers(2, 6, 20))
    centres = rng.normal(size=(60, 6))
    embeddings = centres[people] + 0.8 * rng.normal(size=(len(people), 6))
    return embeddings, people, rng.normal(size=(15, 6))


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def all_pairs(embeddings, people):
    for i in range(len(people)):
        for j in range(i):
            yield i, j, cosine(embeddings[i], embeddings[j]), people[i] == people[j]


def test_names(faces):
    assert tuple(measures.measure(*faces)) == measures.NAMES
    assert measures.NAMES == (
        "accuracy",
        "tar@1e-1",
        "tar@1e-2",
        "tar@1e-3",
        "tar@1e-4",
        "rank1",
    )


def test_true_accept_rates(faces):
    found = measures.measure(*faces)
    pairs = list(all_pairs(*faces[:2]))
    genuine = [score for *_, score, is_same in pairs if is_same]
    impostor = sorted((score for *_, score, is_same in pairs if not is_same), reverse=True)
    for far in measures.FARS:
        threshold = impostor[int(far * len(impostor))]
        expected = np.mean([score > threshold + 1e-6 for score in genuine])
        assert found[measures.tar_name(far)] == pytest.approx(expected)


def test_rank1(faces):
    embeddings, people, distractors = faces
    hits = []
    for probe in range(len(people)):
        others = [*distractors, *embeddings[people != people[probe]]]
        best = max(cosine(embeddings[probe], other) for other in others)
        for mate in np.flatnonzero(people == people[probe]):
            if mate != probe:
                hits.append(cosine(embeddings[probe], embeddings[mate]) > best)
    assert measures.measure(*faces)["rank1"] == pytest.approx(np.mean(hits))


def test_accuracy_over_folds_of_people(faces):
    embeddings, people, _ = faces
    fold_of = {person: number // 2 for number, person in enumerate(np.unique(people))}
    pairs = [
        (fold_of[people[i]], score, is_same)
        for i, j, score, is_same in all_pairs(embeddings, people)
        if fold_of[people[i]] == fold_of[people[j]]
    ]

    def accuracy(chosen, threshold):
        kinds = ([s > threshold for _, s, same in chosen if same],)
        kinds += ([s <= threshold for _, s, same in chosen if not same],)
        return np.mean([np.mean(kind) for kind in kinds])

    accuracies = []
    for fold in range(10):
        inside = [pair for pair in pairs if pair[0] == fold]
        others = [pair for pair in pairs if pair[0] != fold]
        best = max(measures.THRESHOLDS, key=lambda threshold: accuracy(others, threshold))
        accuracies.append(accuracy(inside, best))
    assert measures.measure(*faces)["accuracy"] == pytest.approx(np.mean(accuracies), abs=1e-9)


def test_blocks_of_probes_make_no_difference(faces, monkeypatch):
    whole = measures.measure(*faces)
    monkeypatch.setattr(measures, "PROBES_AT_ONCE", 7)
    assert measures.measure(*faces) == pytest.approx(whole)


def test_perfect_embeddings(rng):
    people = np.repeat(np.arange(20), 3)
    found = measures.measure(np.eye(21)[people], people, np.eye(21)[[20]])
    assert all(value == 1 for value in found.values())
