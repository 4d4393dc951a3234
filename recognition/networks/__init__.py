"""Networks in insightface's structure and names, as Gluon blocks, with their files.

    network = create("r50")
    network.initialize(initializer("r50"), ctx=contexts)
    embeddings = network(images)
    save_model(network, "models/r50/model", epoch=1)

Images are (B, 3, H, W) pixels of 0 to 255, RGB; embeddings are (B, D).
"""

from dsoftmax.recognition.networks.factory import NETWORKS, create, initializer, names, options_of
from dsoftmax.recognition.networks.files import load_parameters, save_checkpoint, save_model
from dsoftmax.recognition.networks.network import ImageSizeError, Network
from dsoftmax.recognition.networks.symbols import to_symbol

__all__ = [
    "NETWORKS",
    "ImageSizeError",
    "Network",
    "create",
    "initializer",
    "load_parameters",
    "names",
    "options_of",
    "save_checkpoint",
    "save_model",
    "to_symbol",
]
