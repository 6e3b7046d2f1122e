"""The ladder as one page, docs/ladder.html: programs to climb, their diffs, and the measurements beside them.

Python writes texts, diffs and figures as HTML, which is all there without scripts; climb.js shows a stage of it at a
time, with its program, and requests nothing.
Measuring lives in lab/, and so does docs/ladder.md.
"""
