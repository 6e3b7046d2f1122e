"""Predicting: memory, time and messages of a run, on devices that are not here. Runs no training step."""
