"""MemCache's configuration language: the keys of every version, typed models, rendering and checking.

Pure: no file is opened and no clock is read here. Paths are looked up only through a function that the caller
passes. Read ``keys`` for the facts, ``model`` and ``render`` to write files, ``check`` to judge files that people
wrote.
"""
