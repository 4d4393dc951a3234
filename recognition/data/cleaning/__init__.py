"""Find what is wrong with a dataset, by the embeddings of its images, and write it without that."""
