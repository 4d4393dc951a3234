"""insightface's datasets: records, verification packs, and training batches made of them.

Nothing here needs MXNet.
"""

from dsoftmax.tools.preflight import check_opencv

check_opencv()
