"""Preparing: from texts to a folder of token files, and the description by which it is checked.

writer.py writes a folder; every data/*/prepare.py calls it. A corpus of documents (corpus.py), which sources.py reads
from text files, records.py from JSON lines, Parquet files or the Hugging Face hub, passes through encode.py into the
token files of resume.py. meta.py reads meta.json and checks a folder against it. Nothing here imports torch, so a
prepare.py starts at once. Not here: the choice of texts (data/*/prepare.py), reading the tokens (nanoladder/data).
"""
