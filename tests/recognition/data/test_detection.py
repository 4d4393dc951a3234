"""Detectors against naive decoders of the same networks, and what is refused."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import detectors
import numpy as np
import pytest
from detectors import POINTS, SIDES, STRIDES, marker_photo, marker_scrfd, write_network

from dsoftmax.recognition.data.detection import DetectorError, FaceFinder, open_detector
from dsoftmax.recognition.data.detection.base import suppress
from dsoftmax.recognition.data.detection.graph import read_outputs
from dsoftmax.recognition.data.detection.yunet import OUTPUTS
from dsoftmax.recognition.data.images import NoFaceError

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


def photo(rng, height, width):
    return rng.integers(0, 256, (height, width, 3), np.uint8)


def rgb(image):
    return np.ascontiguousarray(image[:, :, ::-1])


def run(path, image, order=None):
    """Run a network on pixels of its size, without the code under test."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    outputs = session.run(order, {"image": image.transpose(2, 0, 1)[None].astype(np.float32)})
    return dict(zip(order or [output.name for output in session.get_outputs()], outputs))


def check(faces, expected):
    """Compare what was detected with (score, box, points)s."""
    assert len(faces) == len(expected) > 0
    for face, (score, box, points) in zip(faces, expected):
        assert abs(face.score - score) < 1e-5
        np.testing.assert_allclose(face.box, box, atol=1e-3)
        np.testing.assert_allclose(face.landmarks, points, atol=1e-3)


class TestScrfd:
    @pytest.mark.parametrize("form", [(-1,), (1, -1)], ids=["insightface", "batched"])
    @pytest.mark.parametrize("size", [(64, 64), (96, 160)])
    def test_random_network(self, rng, tmp_path, size, form):
        """All outputs of a network, decoded anchor by anchor; insightface's order and another."""
        outputs = detectors.scrfd_outputs(form)
        order = rng.permutation(len(outputs))
        path = write_network(
            tmp_path / "a.onnx",
            [outputs[place] for place in order],
            size,
            detectors.random_weights(rng),
        )
        image = photo(rng, *size)
        raw = run(path, (image - 127.5) / 128)
        by_stride = {
            stride: (
                raw[f"score{stride}"].ravel(),
                raw[f"box{stride}"].reshape(-1, 4),
                raw[f"points{stride}"].reshape(-1, 10),
            )
            for stride in STRIDES
        }
        found = detectors.naive_scrfd(by_stride, *size, 0.4)
        assert len(found) > 30
        check(open_detector(path, 0.4).detect(image), detectors.keep_best(found, 0.4))

    @pytest.mark.parametrize(
        ("size", "factor"), [((64, 64), 1), ((64, 64), 3), ((48, 64), 2), ((64, 32), 5)]
    )
    def test_known_boxes(self, tmp_path, size, factor):
        """Photographs of any size and shape, of a network that finds red squares."""
        detector = open_detector(marker_scrfd(tmp_path / "a.onnx"))
        cells = [(1, 1), (3, 5)]
        image, landmarks = marker_photo(cells, size, factor=factor)
        faces = sorted(detector.detect(rgb(image)), key=lambda face: face.box[0])
        assert len(faces) == 2
        for face, cell, points in zip(faces, cells, landmarks):
            box = np.hstack([cell - SIDES[:2], cell + SIDES[2:]]) * 8 * factor
            np.testing.assert_allclose(face.box, box, atol=1e-3)
            np.testing.assert_allclose(face.landmarks, points, atol=1e-3)
            assert face.score > 0.99

    def test_scales_of_both_axes(self, tmp_path):
        """A width of 64 · 100 / 300 pixels is cut to 21: x is scaled by 0.21, y by 64 / 300."""
        detector = open_detector(marker_scrfd(tmp_path / "a.onnx"))
        image = np.full((300, 100, 3), 100, np.uint8)
        rows, columns = (
            slice(24 * 300 // 64 - 2, 32 * 300 // 64 + 3),
            slice(8 * 100 // 21 - 3, None),
        )
        image[rows, columns][:, :44] = (255, 0, 0)
        (face,) = detector.detect(image)
        np.testing.assert_allclose(
            face.landmarks, (np.array([1, 3]) + POINTS) * 8 / (0.21, 64 / 300), rtol=1e-6
        )

    def test_large_faces_are_found_at_a_coarse_scale(self, tmp_path):
        """A network of any input size: marks of 8 pixels of 640, and of 8 of 128."""
        detector = open_detector(marker_scrfd(tmp_path / "a.onnx", ("height", "width")))
        assert detector.sizes == ((640, 640), (128, 128))
        image = np.full((640, 640, 3), 100, np.uint8)
        image[80:88, 400:408] = (255, 0, 0)
        (small,) = detector.detect(image)
        np.testing.assert_allclose(small.landmarks, (np.array([50, 10]) + POINTS) * 8)
        detector.sizes = detector.sizes[1:]
        image[200:240, 120:160] = (255, 0, 0)
        (large,) = detector.detect(image)
        np.testing.assert_allclose(large.landmarks, (np.array([3, 5]) + POINTS) * 40)

    def test_threads_see_the_same(self, rng, tmp_path):
        path = write_network(
            tmp_path / "a.onnx",
            detectors.scrfd_outputs(),
            (64, 64),
            detectors.random_weights(rng),
        )
        detector = open_detector(path, 0.4)
        images = [photo(rng, 64, 64) for _ in range(12)]
        alone = [detector.detect(image) for image in images]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(detector.detect, images))
        assert [[face.score for face in faces] for faces in together] == [
            [face.score for face in faces] for faces in alone
        ]


def yunet_outputs():
    """Return YuNet's outputs in its order; the names that begin with cls and obj are scores."""
    numbers = {"cls": 1, "obj": 1, "bbox": 4, "kps": 10}
    return [
        (f"{kind}_{stride}", stride, count, (1, -1, count))
        for kind, count in numbers.items()
        for stride in STRIDES
    ]


@pytest.fixture
def yunet(rng, tmp_path):
    def weights(name, stride, channels):
        scale = 0.002 if name.startswith(("cls", "obj")) else 0.0004
        kernel = rng.normal(0, scale * 8 / stride, (channels, 3, stride, stride))
        # Pixels are 0 to 255: without their mean, some scores of every network are high.
        return kernel - kernel.mean(axis=(1, 2, 3), keepdims=True), np.zeros(channels)

    return write_network(tmp_path / "yunet.onnx", yunet_outputs(), (96, 64), weights)


class TestYuNet:
    def test_against_a_naive_decoder(self, rng, yunet):
        """OpenCV runs the file; ONNX Runtime and a naive decoder find the same faces."""
        image = photo(rng, 96, 64)
        found = detectors.naive_yunet(run(yunet, image[:, :, ::-1]), 96, 64, 0.6)
        detector = open_detector(yunet, 0.6)
        candidates = detector.find(image, (96, 96))
        assert len(candidates.scores) > 5
        for score, box, points in zip(
            *(part.tolist() for part in (candidates.scores, candidates.boxes, candidates.landmarks))
        ):
            distance, nearest = min(
                (np.abs(np.subtract(one[1], box)).max(), number) for number, one in enumerate(found)
            )
            assert distance < 1e-2
            assert abs(found[nearest][0] - score) < 1e-4
            np.testing.assert_allclose(found[nearest][2], points, atol=1e-2)
        assert max(one[0] for one in found) == pytest.approx(candidates.scores.max(), abs=1e-4)

    def test_photographs_are_made_smaller(self, rng, yunet):
        image = photo(rng, 96, 64)
        detector = open_detector(yunet, 0.6)
        large = np.repeat(np.repeat(image, 2, axis=0), 2, axis=1)
        at_once, scaled = detector.find(image, (96, 96)), detector.find(large, (96, 96))
        np.testing.assert_allclose(scaled.boxes, at_once.boxes * 2, atol=1e-3)
        np.testing.assert_allclose(scaled.landmarks, at_once.landmarks * 2, atol=1e-3)

    def test_threads_see_the_same(self, rng, yunet):
        detector = open_detector(yunet, 0.6)
        images = [photo(rng, 96, 64 + 32 * (number % 2)) for number in range(12)]
        alone = [len(detector.detect(image)) for image in images]
        with ThreadPoolExecutor(4) as pool:
            assert [len(faces) for faces in pool.map(detector.detect, images)] == alone
        assert min(alone) > 0

    def test_needs_no_onnx_runtime(self, yunet, monkeypatch):
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
        monkeypatch.setitem(sys.modules, "onnx", None)
        open_detector(yunet)


def test_suppression_against_a_naive_one(rng):
    corners = rng.uniform(0, 60, (200, 2))
    boxes = np.hstack([corners, corners + rng.uniform(5, 40, (200, 2))])
    scores = rng.uniform(0, 1, 200)
    for most in (0.1, 0.4, 0.9):
        expected = detectors.keep_best(list(zip(scores, boxes, range(200))), most)
        assert suppress(boxes, scores, most) == [face[2] for face in expected]
    assert suppress(boxes[:0], scores[:0]) == []


def test_which_face_is_meant(tmp_path):
    """The largest box, or the middle of the photograph; none is an error."""

    class Fixed:
        path, min_score = "none", 0.5

        def __init__(self, faces):
            self.faces = faces

        def detect(self, rgb):
            from dsoftmax.recognition.data.detection import Detection

            assert rgb[0, 0].tolist() == [3, 2, 1]  # RGB of the BGR below
            return [Detection(np.array(box, float), 0.9, np.zeros((5, 2))) for box in self.faces]

    image = np.full((100, 200, 3), (1, 2, 3), np.uint8)
    large, central, high = [10, 10, 60, 60], [90, 40, 110, 60], [10, 0, 20, 55]
    for choice, expected in (("largest", large), ("central", central)):
        for faces in ([large, central, high], [high, central, large]):
            face, count = FaceFinder(Fixed(faces), choice).find(image)
            assert (face.box.tolist(), count) == (expected, 3)
    with pytest.raises(NoFaceError, match=r"no face with a score of 0\.5 or more"):
        FaceFinder(Fixed([]))(image)
    with pytest.raises(ValueError, match="largest, central, not 'smallest'"):
        FaceFinder(Fixed([]), "smallest")


class TestRefusals:
    def test_names_of_outputs(self, yunet, tmp_path):
        assert set(read_outputs(yunet)) == OUTPUTS
        path = marker_scrfd(tmp_path / "a.onnx")
        assert read_outputs(path) == [output.name for output in onnx.load(path).graph.output]

    @pytest.mark.parametrize(
        "content", [b"", b"not a network", b"\x0a\xff\xff\xff\xff\x0f", b"\x3a"]
    )
    def test_no_onnx_file(self, tmp_path, content):
        (tmp_path / "a.onnx").write_bytes(content)
        with pytest.raises(DetectorError, match=r"a\.onnx is no ONNX file, or a damaged one"):
            open_detector(str(tmp_path / "a.onnx"))

    def test_a_pointer_of_git_lfs(self, tmp_path):
        """A clone without Git LFS holds these in place of OpenCV's YuNet."""
        path = tmp_path / "yunet.onnx"
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:8f\nsize 232589\n")
        with pytest.raises(DetectorError, match="is a pointer of Git LFS, not the network"):
            open_detector(str(path))

    def test_a_yunet_that_opencv_cannot_run(self, tmp_path):
        outputs = [
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
            for name in sorted(OUTPUTS)
        ]
        image = onnx.helper.make_tensor_value_info("input", onnx.TensorProto.FLOAT, (1, 3, 64, 64))
        node = onnx.helper.make_node("Unheard", ["input"], sorted(OUTPUTS))
        graph = onnx.helper.make_graph([node], "yunet", [image], outputs)
        onnx.save(onnx.helper.make_model(graph), str(tmp_path / "a.onnx"))
        with pytest.raises(DetectorError, match=r"can't run .*a\.onnx, although it is YuNet"):
            open_detector(str(tmp_path / "a.onnx"))

    def test_every_truncation_is_refused(self, tmp_path):
        content = Path(marker_scrfd(tmp_path / "a.onnx")).read_bytes()
        for length in range(0, len(content), len(content) // 40):
            (tmp_path / "cut.onnx").write_bytes(content[:length])
            with pytest.raises(DetectorError):
                open_detector(str(tmp_path / "cut.onnx"))

    def test_other_networks(self, rng, tmp_path):
        weights = detectors.random_weights(rng)
        recogniser = write_network(tmp_path / "a.onnx", [("fc1", 8, 4, (1, -1))], (64, 64), weights)
        with pytest.raises(DetectorError, match=r"it has 1 output \(fc1\), SCRFD has 9"):
            open_detector(recogniser)
        bare = write_network(
            tmp_path / "b.onnx",
            detectors.scrfd_outputs(kinds=("score", "box")),
            (64, 64),
            weights,
        )
        with pytest.raises(DetectorError, match="SCRFD without keypoints, and faces can't be"):
            open_detector(bare)
        nine = [(f"out{number}", 8, 4, (-1, 4)) for number in range(9)]
        with pytest.raises(DetectorError, match=r"not SCRFD.* image of 64x64 its outputs are \("):
            open_detector(write_network(tmp_path / "c.onnx", nine, (64, 64), weights))

    def test_missing_onnx_runtime(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
        with pytest.raises(ImportError, match=r"needs the extra onnx: pip install 'dsof"):
            open_detector(marker_scrfd(tmp_path / "a.onnx"))

    def test_bad_arguments(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"nothing\.onnx: there is no such file"):
            open_detector(str(tmp_path / "nothing.onnx"))
        with pytest.raises(ValueError, match="between 0 and 1, not 2"):
            open_detector(marker_scrfd(tmp_path / "a.onnx"), 2)
