"""Cut a checkpoint down to what its embedding needs."""

from __future__ import annotations

import os
from typing import NamedTuple

from dsoftmax.eval.models import EMBEDDING, INPUT, ModelName, load_network

EPOCH = 0  # insightface's number for what it slimmed


class Slimmed(NamedTuple):
    """A checkpoint that was made smaller.

    Attributes
    ----------
    model : str
        The new one, as ``prefix,epoch``.
    path : str
        Of its parameters.
    bytes_before, bytes_after : int
        Sizes of the parameter files.
    dropped : list of str
        The parameters that were left out.
    """

    model: str
    path: str
    bytes_before: int
    bytes_after: int
    dropped: list[str]

    def __str__(self) -> str:
        dropped = ", ".join(self.dropped) or "nothing"
        return (
            f"{self.path}: {self.bytes_after:,} bytes, before {self.bytes_before:,}\n"
            f"dropped {dropped}\n"
            f"the same embeddings: --model {self.model}"
        )


def slim_model(name: ModelName, output: str | None = None) -> Slimmed:
    """Save the part of a checkpoint that computes ``fc1_output``, as insightface's model_slim does.

    Parameters
    ----------
    name : ModelName
    output : str, optional
        Prefix of the new files; by default the old prefix and an ``s``.

    Raises
    ------
    ValueError
        If the network has no ``fc1_output``.
    """
    from dsoftmax.recognition.networks import save_checkpoint  # late, because it imports MXNet

    if name.is_onnx:
        raise ValueError(f"{name}: an ONNX file has no classifier; give a symbol as prefix,epoch")
    symbol, parameters = load_network(name)
    if symbol.list_outputs() != [EMBEDDING]:
        raise ValueError(f"{name.files()[0]}: it has no output named {EMBEDDING} to cut it at")
    auxiliary = set(symbol.list_auxiliary_states())
    needed = [key for key in symbol.list_inputs() if key != INPUT]
    kept = {f"{'aux' if key in auxiliary else 'arg'}:{key}": parameters[key] for key in needed}
    slim = ModelName(f"{name.prefix}s" if output is None else output, EPOCH)
    if os.path.abspath(slim.prefix) == os.path.abspath(name.prefix):
        raise ValueError(
            f"--output {output}: its symbol would replace the one that is made smaller"
        )
    before = os.path.getsize(name.files()[1])
    path = save_checkpoint(slim.prefix, EPOCH, symbol.tojson(), kept)
    dropped = sorted(set(parameters) - set(needed))
    return Slimmed(str(slim), path, before, os.path.getsize(path), dropped)
