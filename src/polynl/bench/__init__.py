"""Benchmarks of layers and networks: run time, peak memory, and how both grow with the map.

`cases` and `networks` list what is measured; `measure` and `memory` measure it; `runner` is the loop over
both; `plots` draws figures; `compare` shows the changes between two runs.
"""
