"""Measuring: profile.py's modes, the configs that they measure, the processes that take measurements, and their tables.

Also gain or noise (stats, judge), and other people's training loops (peers). Not here: whole recipes and races
(research).
"""
