"""Tokenizers, each a tiktoken.Encoding.

encoding.py builds, saves and loads them, huggingface.py converts them from and to Hugging Face's format, existing.py
finds that of a run, a dataset or a model, also on the hub (hub.py), meta_pkl.py reads nanoGPT's meta.pkl. Not here:
encoding a whole corpus (nanoladder/prepare).
"""
