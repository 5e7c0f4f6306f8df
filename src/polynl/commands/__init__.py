"""The commands: dataclasses of options, whose docstrings are the help texts.

Imports that only `run` needs are made there: `polynl --help` need not load torch or matplotlib.
"""
