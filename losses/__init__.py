"""The loss family of Dissected Softmax, as Gluon HybridBlocks."""

from dsoftmax.tools.preflight import check_mxnet

check_mxnet()
