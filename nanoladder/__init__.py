"""Packages behind train.py, one for each subject; each package's docstring lists its contents.

kernels/ and private.py are below model.py, which imports them; all others are above it.
"""
