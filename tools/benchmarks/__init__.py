"""What the benchmarks in tools/ measure; the commands parse flags, call this and print."""
