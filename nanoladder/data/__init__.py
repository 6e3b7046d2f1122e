"""Tokenizers, prepared datasets and the loader; a folder a dataset, each with its prepare.py."""
