"""What layers and networks cost on this machine: run time, peak memory, and how both grow with the map.

`cases` and `networks` are the tables of what is measured, `measure` and `memory` how, `runner` the one loop
over both, `results` the file they end in, `report` and `plots` what is shown of it, `compare` what changed.
"""
