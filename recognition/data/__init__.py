"""insightface's datasets: records, verification packs, and training batches made of them.

Nothing here needs MXNet. OpenCV is loaded when the first image is decoded or drawn.
"""
