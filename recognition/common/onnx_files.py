"""Check that an ONNX file reads no files that are not its own.

A tensor may say that its numbers are in another file. ONNX Runtime reads any that it names, also
``/etc/passwd`` or ``../secret``.
"""

from __future__ import annotations

import os
from typing import Any, Iterator

TENSOR, EXTERNAL = "onnx.TensorProto", 1  # the latter as a tensor's data_location


def check_external_data(model: Any, path: str) -> None:
    """Refuse a model whose numbers are in other files than those beside it.

    Parameters
    ----------
    model : onnx.ModelProto
        Loaded without these files.
    path : str
        Where it comes from.

    Raises
    ------
    ValueError
        With the name of the file that it wants to read.
    """
    folder = os.path.dirname(path)
    for name in _external_files(model):
        beside = os.path.join(folder, name)
        is_plain = name == os.path.basename(name)
        if not is_plain or os.path.islink(beside) or not os.path.isfile(beside):
            raise ValueError(
                f"it wants to read {name!r}: only files beside it, no links, may hold its numbers"
            )


def _external_files(message: Any) -> Iterator[str]:
    """Yield the names of all files that a protobuf message, or one inside it, refers to."""
    if message.DESCRIPTOR.full_name == TENSOR and message.data_location == EXTERNAL:
        entries = {entry.key: entry.value for entry in message.external_data}
        yield entries.get("location", "")
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in [value] if hasattr(value, "ListFields") else value:
                yield from _external_files(part)
