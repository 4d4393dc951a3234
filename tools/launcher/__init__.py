"""Start, watch and stop the processes of a job, here or on other hosts."""
