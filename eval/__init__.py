"""Evaluation of face embeddings by the protocols of the paper."""
