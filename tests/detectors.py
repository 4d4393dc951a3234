"""Detectors small enough to write anew for a test, and what they must find, decoded naively.

A marker is a red square. A network sees one where a cell's mean colour is red enough; the box and
landmarks around it are constants. Networks with random weights see faces everywhere.
"""

from __future__ import annotations

import math
from pathlib import Path

import cv2
import numpy as np

STRIDES = (8, 16, 32)
SIDES = np.array([1.5, 2.0, 3.5, 3.0])  # of a marker's face: distances to its box, in strides
POINTS = np.array([[0, 0], [2, 0.5], [1, 1], [0, 2], [2, 2.25]])  # landmarks, in strides
SHARPNESS = 60.0  # of the score, where a cell is red


def write_network(path, outputs, size=("height", "width"), weights=None):
    """Write a network of convolutions, one per output, from (name, stride, numbers, form)s.

    `form` is the shape of an output, with -1 for the anchors: (-1, 4) or (1, -1, 4). `weights`
    returns the kernel and the bias of an output of a name; those of scores go through a sigmoid.
    """
    import onnx
    from onnx import helper, numpy_helper

    nodes, constants, results = [], [], []
    for name, stride, channels, form in outputs:
        kernel, bias = weights(name, stride, channels)
        constants += [
            numpy_helper.from_array(np.asarray(kernel, np.float32), f"{name}_kernel"),
            numpy_helper.from_array(np.asarray(bias, np.float32), f"{name}_bias"),
            numpy_helper.from_array(np.array(form, np.int64), f"{name}_form"),
        ]
        inputs = ["image", f"{name}_kernel", f"{name}_bias"]
        squares = {"kernel_shape": [stride, stride], "strides": [stride, stride]}
        nodes.append(helper.make_node("Conv", inputs, [f"{name}_map"], **squares))
        last = f"{name}_map"
        if form[-1] == 1:
            nodes.append(helper.make_node("Sigmoid", [last], [f"{name}_sigmoid"]))
            last = f"{name}_sigmoid"
        nodes += [
            helper.make_node("Transpose", [last], [f"{name}_cells"], perm=[0, 2, 3, 1]),
            helper.make_node("Reshape", [f"{name}_cells", f"{name}_form"], [name]),
        ]
        shape = [f"{name}_anchors" if side == -1 else side for side in form]
        results.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    image = helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, [1, 3, *size])
    graph = helper.make_graph(nodes, "detector", [image], results, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=6)
    onnx.checker.check_model(model)
    Path(path).write_bytes(model.SerializeToString())
    return str(path)


def scrfd_outputs(form=(-1,), kinds=("score", "box", "points")):
    """Return the outputs of an SCRFD, in insightface's order: all scores, boxes, landmarks."""
    numbers = {"score": 1, "box": 4, "points": 10}
    return [
        (f"{kind}{stride}", stride, 2 * numbers[kind], (*form, numbers[kind]))
        for kind in kinds
        for stride in STRIDES
    ]


def random_weights(rng):
    """Return weights of a network that finds faces everywhere."""

    def weights(name, stride, channels):
        is_score = name.startswith("score")
        deviation = (1.0 if is_score else 0.2) / stride  # so that boxes have positive sides
        kernel = rng.normal(0, deviation, (channels, 3, stride, stride))
        return kernel, np.full(channels, -1.0 if is_score else 1.5)

    return weights


def marker_weights(name, stride, channels):
    """Return weights of a network that finds red cells at stride 8, by the first anchor."""
    kernel = np.zeros((channels, 3, stride, stride))
    if name.startswith("score"):
        bias = np.full(channels, -SHARPNESS)
        if stride == STRIDES[0]:
            # Pixels are -1 to 1: a red cell has 1, -1, -1 and thus a sum of 3.
            kernel[0] = (SHARPNESS / stride**2) * np.array([1, -1, -1])[:, None, None]
            bias[0] = -2.5 * SHARPNESS
        return kernel, bias
    constants = SIDES if name.startswith("box") else POINTS.ravel()
    return kernel, np.tile(constants, 2)


def marker_scrfd(path, size=(64, 64), form=(-1,)):
    """Write an SCRFD that finds `markers`; with a fixed size, on images of that size."""
    return write_network(path, scrfd_outputs(form), size, marker_weights)


def marker_photo(cells, size=(64, 64), colour=(60, 110, 90), factor=1):
    """Draw a BGR picture with markers in these (column, row) cells; return their landmarks, too.

    `factor` makes the picture larger than the network's input.
    """
    rng = np.random.default_rng(len(cells))
    photo = np.full((*size, 3), colour, np.uint8) + rng.integers(0, 40, (*size, 3), np.uint8)
    for column, row in cells:
        photo[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = (0, 0, 255)
    photo = cv2.resize(photo, None, fx=factor, fy=factor, interpolation=cv2.INTER_NEAREST)
    return photo, [(np.array(cell) + POINTS) * 8 * factor for cell in cells]


def overlap(one, other):
    """Return the intersection over union of two boxes of pixels."""
    width = min(one[2], other[2]) - max(one[0], other[0]) + 1
    height = min(one[3], other[3]) - max(one[1], other[1]) + 1
    if width <= 0 or height <= 0:
        return 0.0
    areas = [(box[2] - box[0] + 1) * (box[3] - box[1] + 1) for box in (one, other)]
    return width * height / (sum(areas) - width * height)


def keep_best(faces, most):
    """Keep (score, box, points) that overlap no better one by more than `most`."""
    kept = []
    for face in sorted(faces, key=lambda face: -face[0]):
        if all(overlap(face[1], better[1]) <= most for better in kept):
            kept.append(face)
    return kept


def naive_scrfd(outputs, height, width, min_score):
    """Decode an SCRFD's outputs by stride, {stride: (scores, boxes, points)}, anchor by anchor."""
    faces = []
    for stride, (scores, boxes, points) in outputs.items():
        anchor = 0
        for y in range(0, height, stride):
            for x in range(0, width, stride):
                for _ in range(2):
                    left, top, right, bottom = boxes[anchor] * float(stride)
                    if scores[anchor] >= min_score:
                        where = [
                            (x + dx * stride, y + dy * stride)
                            for dx, dy in zip(points[anchor][::2], points[anchor][1::2])
                        ]
                        box = (x - left, y - top, x + right, y + bottom)
                        faces.append((float(scores[anchor]), box, where))
                    anchor += 1
        assert anchor == len(scores)
    return faces


def naive_yunet(outputs, height, width, min_score):
    """Decode a YuNet's outputs by name, cell by cell, as OpenCV documents them."""
    faces = []
    for stride in STRIDES:
        classes, objects, boxes, points = (
            outputs[f"{kind}_{stride}"][0] for kind in ("cls", "obj", "bbox", "kps")
        )
        for row in range(height // stride):
            for column in range(width // stride):
                cell = row * (width // stride) + column
                sure = [min(max(float(part[cell]), 0.0), 1.0) for part in (classes, objects)]
                score = math.sqrt(sure[0] * sure[1])
                x, y = (
                    (place + shift) * stride for place, shift in zip((column, row), boxes[cell])
                )
                wide, high = (math.exp(size) * stride for size in boxes[cell][2:])
                where = [
                    ((column + dx) * stride, (row + dy) * stride)
                    for dx, dy in zip(points[cell][::2], points[cell][1::2])
                ]
                box = (x - wide / 2, y - high / 2, x + wide / 2, y + high / 2)
                if score >= min_score:
                    faces.append((score, box, where))
    return faces
