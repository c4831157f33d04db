"""Texts that ship with kvtierd. Each has a ``.SOURCE.txt`` beside it with title, author, source and licence."""
