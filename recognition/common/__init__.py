"""The base of everything: files, threads, command lines, memory, devices, many processes.

It imports nothing else of dsoftmax.
"""
