"""Tokenizers, prepared datasets and the loader; a folder a dataset, each with its prepare.py."""

FORMAT_VERSION = 1  # of a prepared folder, which writer.py writes and loader.py reads
