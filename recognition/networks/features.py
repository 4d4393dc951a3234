"""What all families of networks are: layers that compute features of pixels."""

from __future__ import annotations

from mxnet.gluon.block import HybridBlock

from dsoftmax.recognition.networks.layers import sequence


class Features(HybridBlock):
    """Chains the layers of a network that come before its embedding.

    The constructor of a family takes ``norm``, which makes a `BatchNorm` of a name, ``act``, the
    kind of activation, and the family's own options; it hands its first layers to this one and
    adds the others to `body`.

    Attributes
    ----------
    body : HybridSequential
    head_groups : int or None
        Groups of channels in the heads that convolve each by itself; None for one per channel.
    gdc_weight : str
        Name of the weight of the dense layer in the head GDC.
    """

    head_groups: int | None = None
    gdc_weight = "pre_fc1_weight"

    def __init__(self, *layers: HybridBlock):
        super().__init__(prefix="")
        self.body = sequence(*layers)

    def hybrid_forward(self, F, data):
        """Map pixels, (B, 3, H, W), to features, (B, C, h, w) or (B, C)."""
        return self.body(data)
