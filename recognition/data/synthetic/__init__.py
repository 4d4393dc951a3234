"""The embedded dataset: faces of people who never lived, as many as wanted.

    make_dataset("faces", identities=1000, images=20)

Importing this package loads OpenCV.
"""

from dsoftmax.recognition.data.synthetic.dataset import (
    FIRST_VAL_IDENTITY,
    choose_pairs,
    draw_face,
    draw_person,
    make_dataset,
)
from dsoftmax.recognition.data.synthetic.people import (
    Identity,
    Photo,
    draw_identity,
    draw_photo,
)

__all__ = [
    "FIRST_VAL_IDENTITY",
    "Identity",
    "Photo",
    "choose_pairs",
    "draw_face",
    "draw_identity",
    "draw_person",
    "draw_photo",
    "make_dataset",
]
