"""The ladder as one page, docs/ladder.html: programs to climb, their diffs, and the measurements beside them.

Everything that the page shows is computed here at build time, or drawn by climb.js and worth.js in the browser, from
what the page holds itself: it asks no network for anything. Measuring lives in lab/, and so does docs/ladder.md.
"""
