"""Training in insightface's style: data, networks, the loop and its checkpoints."""
