"""MXNet's parameter server: the workers' side, the servers' side, and the keys they share."""

from dsoftmax.recognition.common.preflight import check_mxnet

check_mxnet()  # in a server or scheduler, a plain `import mxnet` would begin to serve at once
