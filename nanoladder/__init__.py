"""Packages behind train.py, one for each subject; each package's docstring lists its contents."""
