"""The ladder as a page for a browser: programs to climb, their diffs, and the measurements beside them.

Python writes texts and figures as HTML, complete without scripts; climb.js shows a stage of it at a time,
with its program and its diff, and requests nothing. docs/ladder.md has the diffs without scripts.
"""
