"""Commands: datasets, models, benchmarks. Each file's work lives in importable functions."""
