"""Translate trained networks, MXNet symbols with their parameters, to ONNX files.

- `graph`: an ONNX graph under construction, and the MXNet nodes that become part of it
- `operators`: how each of MXNet's operators is written with ONNX's
- `translation`: a whole network, with its pixels scaled inside or outside
- `export`: the file, checked against MXNet before it is written
"""

from dsoftmax.eval.onnx_export.export import Exported, export_model
from dsoftmax.eval.onnx_export.translation import RAW_PIXELS, SCALED_PIXELS, translate

__all__ = ["RAW_PIXELS", "SCALED_PIXELS", "Exported", "export_model", "translate"]
