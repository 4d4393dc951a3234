"""Bags of images for triplets."""

import numpy as np
import pytest

from dsoftmax.recognition.data.bags import Bags

COUNTS = (9, 1, 5, 3, 7, 2, 1)  # images of each identity


@pytest.fixture
def classes(rng):
    return rng.permutation(np.repeat(np.arange(len(COUNTS)), COUNTS))


def test_a_pass_has_a_few_images_of_each_identity(classes):
    bags = Bags(classes, images_per_identity=4, size=1000, seed=3)
    assert (bags.size, bags.per_pass) == (4 + 1 + 4 + 3 + 4 + 2 + 1, 1)
    for number in range(3):
        images = bags.draw(number)
        assert len(set(images.tolist())) == len(images)
        found = classes[images]
        assert np.bincount(found).tolist() == [min(count, 4) for count in COUNTS]
        assert np.count_nonzero(np.diff(found)) == len(COUNTS) - 1  # one after the other


def test_bags_cut_a_pass(classes):
    bags = Bags(classes, images_per_identity=4, size=6, seed=3)
    whole = Bags(classes, images_per_identity=4, size=1000, seed=3)
    assert bags.per_pass == 3  # and one image is left
    for number in (4, 0, 2, 5, 1, 3):
        sequence_number, place = divmod(number, 3)
        expected = whole.draw(sequence_number)[6 * place : 6 * place + 6]
        np.testing.assert_array_equal(bags.draw(number), expected)


def test_a_bag_depends_on_seed_and_number_alone(classes):
    one, other = Bags(classes, 3, 8, seed=1), Bags(classes, 3, 8, seed=2)
    assert one.draw(0).tolist() != one.draw(1).tolist()
    assert one.draw(0).tolist() != other.draw(0).tolist()
    later = one.draw(7).tolist()
    assert Bags(classes, 3, 8, seed=1).draw(7).tolist() == later


def test_all_images_of_an_identity_have_their_turn(classes):
    bags = Bags(classes, images_per_identity=2, size=1000, seed=3)
    seen = np.concatenate([bags.draw(number) for number in range(60)])
    assert set(seen.tolist()) == set(range(len(classes)))
