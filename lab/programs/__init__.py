"""Programs of the stages and rungs, folded from train.py and model.py; their diffs; the pages that show them."""
