import os

import numpy as np
import pytest

from dsoftmax.recognition.data.records import Records
from dsoftmax.recognition.data.synthetic import make_dataset
from dsoftmax.tools.reproduction import people


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("source"))
    make_dataset(folder, identities=12, images=3, val_identities=0, pairs=0, size=32)
    return folder


def images_of(folder):
    records = Records(folder)
    return [records.read(number)[1].tobytes() for number in range(len(records))]


def test_every_image_is_in_one_part_and_every_person_too(source, tmp_path):
    people.split(source, str(tmp_path), held_out=2)
    parts = [images_of(tmp_path / part) for part in people.PARTS]
    assert [len(part) for part in parts] == [24, 6, 6]
    assert [image for part in parts for image in part] == images_of(source)
    for part, count in zip(people.PARTS, (8, 2, 2)):
        labels = Records(tmp_path / part).labels
        assert labels.tolist() == np.repeat(np.arange(count), 3).tolist()


def test_too_few_people(source, tmp_path):
    with pytest.raises(ValueError, match="12 identities: too few to hold out twice 4"):
        people.split(source, str(tmp_path), held_out=4)
    assert not os.listdir(tmp_path)


def test_images_are_as_networks_take_them(source):
    images, labels = people.load_images(source, (16, 20))
    assert images.shape == (36, 3, 16, 20)
    assert images.dtype == np.uint8
    assert labels.tolist() == np.repeat(np.arange(12), 3).tolist()
