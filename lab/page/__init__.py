"""The ladder as one page, docs/ladder.html: programs to climb, their diffs, and the measurements beside them.

Python computes the contents at build time; the page's scripts draw them in the browser and request nothing.
Measuring lives in lab/, and so does docs/ladder.md.
"""
