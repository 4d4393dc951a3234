"""Export a trained network to an ONNX file that is checked against MXNet before it is written."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dsoftmax.eval.models import ModelName, find_size, import_onnx, load_model, load_network
from dsoftmax.eval.onnx_export.translation import OPSET, SCALED_PIXELS, Pixels, translate
from dsoftmax.recognition.common.files import AtomicFile, explain_full_disk
from dsoftmax.recognition.common.preflight import mxnet

FACES = 8  # to check with
LARGEST_DIFFERENCE = 1e-4  # of the largest number of all embeddings
LOWEST_COSINE = 0.99999


class Agreement(NamedTuple):
    """How closely ONNX Runtime's embeddings agree with MXNet's.

    Attributes
    ----------
    difference : float
        The largest between two numbers, as a share of the largest number.
    cosine : float
        The lowest between the two embeddings of a face.
    """

    difference: float
    cosine: float


class Exported(NamedTuple):
    """An exported file.

    Attributes
    ----------
    path : str
    image_size : (height, width)
    metadata : dict of str to str
        What the file says about itself.
    bytes : int
    opset : int
        Version of ONNX's operators.
    agreement : Agreement or None
        None if it was not checked.
    """

    path: str
    image_size: tuple[int, int]
    metadata: dict[str, str]
    bytes: int
    opset: int
    agreement: Agreement | None

    def __str__(self) -> str:
        about = self.metadata
        lines = [
            f"{self.path}: {self.bytes:,} bytes, opset {self.opset}",
            f"input data: {about['input']}",
            f"output fc1: float32 (batch, {about['embedding_size']})",
        ]
        if self.agreement is None:
            lines.append("not checked against MXNet")
        else:
            lines.append(
                f"checked against MXNet on {FACES} faces: embeddings differ by "
                f"{self.agreement.difference:.1e} of the largest number, lowest cosine "
                f"{self.agreement.cosine:.7f}"
            )
        height, width = self.image_size
        if height != width or height < 112 or height % 16 or height == 192:
            lines.append(
                "note: insightface's get_model does not take faces of this size; its ArcFaceONNX "
                "does if they are square"
            )
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON can hold it."""
        agreement = self.agreement and self.agreement._asdict()
        return {**self._asdict(), "agreement": agreement}


def export_model(
    name: ModelName,
    output: str,
    image_size: tuple[int, int] | None = None,
    pixels: Pixels = SCALED_PIXELS,
    is_checked: bool = True,
) -> Exported:
    """Export a network to an ONNX file.

    Parameters
    ----------
    name : ModelName
        A symbol and its parameters.
    output : str
        The file to write.
    image_size : (height, width), optional
        By default the one of its training, or the first usual one that the network takes.
    pixels : Pixels
        How the file shall want its pixels.
    is_checked : bool
        Compare embeddings with MXNet's, which needs ONNX Runtime.

    Raises
    ------
    ImportError
        If the extra ``onnx`` is not installed.
    ValueError
        If the network can't be translated or run on such images, or if its embeddings differ;
        nothing is written then.
    """
    if name.is_onnx:
        raise ValueError(f"{name}: an ONNX file already; give a symbol as prefix,epoch")
    if not output.endswith(".onnx"):
        raise ValueError(f"--output {output}: the name of an ONNX file ends in .onnx")
    (onnx,) = import_onnx("the export to ONNX", "onnx")
    if is_checked:
        import_onnx("the check of an export, unless --no-check is given,", "onnxruntime")
    symbol, parameters = load_network(name)
    size = _choose_size(name, symbol, parameters, image_size)
    try:
        model = translate(symbol, parameters, size, pixels)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    width = model.graph.output[0].type.tensor_type.shape.dim[1].dim_value
    metadata = _metadata(name, width, size, pixels)
    onnx.helper.set_model_props(model, metadata)
    content = model.SerializeToString()
    with explain_full_disk(output, len(content)), AtomicFile(output) as file:
        file.write(content)
        file.flush()
        agreement = _check(name, file.name, output, size) if is_checked else None
    return Exported(output, size, metadata, len(content), OPSET, agreement)


def _choose_size(name: ModelName, symbol, parameters, wanted: tuple[int, int] | None):
    shapes = {key: parameters[key].shape for key in symbol.list_inputs() if key in parameters}
    size = find_size(symbol, shapes, wanted or name.trained_size())
    if size is None:
        raise ValueError(f"{name}: it takes no usual image size: say which by --image-size")
    if wanted and size != wanted:
        raise ValueError(
            f"{name} can't be run on images of {wanted[0]}x{wanted[1]}: it seems to want "
            f"{size[0]}x{size[1]}: --image-size {size[0]},{size[1]}"
        )
    return size


def _metadata(name: ModelName, width: int, size: tuple[int, int], pixels: Pixels) -> dict[str, str]:
    config = name.config()
    facts = {
        "name": name.label,
        "network": config.get("network"),
        "loss": config.get("loss"),
        "embedding_size": width,
        "image_size": f"{size[0]},{size[1]}",
        "input": f"float32 (batch, 3, {size[0]}, {size[1]}), RGB, {pixels}",
        "input_mean": pixels.mean,
        "input_std": pixels.std,
    }
    return {key: str(value) for key, value in facts.items() if value is not None}


def _check(name: ModelName, path: str, output: str, size: tuple[int, int]) -> Agreement:
    """Compare embeddings of synthetic faces, one at a time and many."""
    cpu = [mxnet().cpu()]
    of_mxnet, of_onnx = load_model(name, cpu, rewrite=False), load_model(ModelName(path), cpu)
    faces = _draw_faces(size)
    batches = [faces[:1], faces[1:]]
    expected = np.concatenate([of_mxnet(batch) for batch in batches]).astype(np.float64)
    found = np.concatenate([of_onnx(batch) for batch in batches]).astype(np.float64)
    if not np.isfinite(expected).all():
        raise ValueError(f"{name}: its embeddings are not finite: its training has failed")
    difference = np.abs(found - expected).max() / np.abs(expected).max()
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    cosine = ((found * expected).sum(axis=1) / lengths).min()
    if not (difference <= LARGEST_DIFFERENCE and cosine >= LOWEST_COSINE):
        raise ValueError(
            f"{output} is not written: in ONNX Runtime, embeddings differ from MXNet's by "
            f"{difference:.1e} of the largest number (at most {LARGEST_DIFFERENCE:g} is legal), "
            f"with a cosine of {cosine:.6f} (at least {LOWEST_COSINE:g})"
        )
    return Agreement(float(difference), float(cosine))


def _draw_faces(size: tuple[int, int]) -> np.ndarray:
    """Return synthetic faces, (n, 3, height, width) uint8, RGB."""
    from dsoftmax.recognition.data.synthetic import draw_face  # late, because it imports OpenCV

    height, width = size
    side = max(size)
    top, left = (side - height) // 2, (side - width) // 2
    faces = np.stack([draw_face(1, identity, 0, side) for identity in range(FACES)])
    cropped = faces[:, top : top + height, left : left + width, ::-1]  # from OpenCV's BGR
    return cropped.transpose(0, 3, 1, 2)
