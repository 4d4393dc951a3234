"""insightface's datasets: records, verification packs, and training batches made of them.

Nothing here needs MXNet.
"""

from dsoftmax.recognition.common.preflight import check_opencv

check_opencv()
