"""Find bad images in a dataset, and summarize what it holds."""

from __future__ import annotations

from typing import Any

import numpy as np

from dsoftmax.recognition.common.parallel import map_ordered
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.data.images import ImageError, decode
from dsoftmax.recognition.data.recordio import RecordError
from dsoftmax.recognition.data.records import Records

IMAGES_PER_TASK = 64


def find_bad_images(records: Records, threads: int) -> dict[int, str]:
    """Decode every image.

    Returns
    -------
    dict of int to str
        The images that can't be read or decoded, or whose label differs from their identity's, and
        why.
    """
    labels = records.labels

    def check(start: int) -> dict[int, str]:
        bad = {}
        for image in range(start, min(start + IMAGES_PER_TASK, len(records))):
            try:
                label, encoded = records.read(image)
                decode(encoded)
            except (ImageError, RecordError) as error:
                bad[image] = str(error)
            else:
                if label != labels[image]:
                    bad[image] = f"label {label} among the images of identity {labels[image]}"
        return bad

    starts = range(0, len(records), IMAGES_PER_TASK)
    bad: dict[int, str] = {}
    with progress(None, total=len(records), desc="decoding", unit="images") as bar:
        for start, bad_here in zip(starts, map_ordered(check, starts, threads)):
            bad.update(bad_here)
            bar.update(min(IMAGES_PER_TASK, len(records) - start))
    return bad


def describe(records: Records, bad_images: dict[int, str] | None) -> dict[str, Any]:
    """Summarize a dataset as values for JSON; `bad_images` is None if nobody looked for them."""
    per_label = np.bincount(records.labels)
    per_identity = per_label[per_label > 0]
    counts, identities = np.unique(per_identity, return_counts=True)
    height, width = records.image_size
    return {
        "path": records.path,
        "style": records.style,
        "identities": len(per_identity),
        "images": len(records),
        "num_classes": records.num_classes,
        "property": list(records.property) if records.property else None,
        "image_size": [height, width],
        "images_per_identity": {
            "min": int(per_identity.min()),
            "median": float(np.median(per_identity)),
            "mean": round(float(per_identity.mean()), 3),
            "max": int(per_identity.max()),
            "histogram": {int(n): int(many) for n, many in zip(counts, identities)},
        },
        "names": {int(label): name for label, name in sorted(records.names.items())},
        "label_gaps": [int(label) for label in np.flatnonzero(per_label == 0)],
        "bad_images": None
        if bad_images is None
        else [
            {
                "image": image,
                "key": int(records.keys[image]),
                "offset": int(records.offsets[image]),
                "why": why,
            }
            for image, why in sorted(bad_images.items())
        ],
    }
