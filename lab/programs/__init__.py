"""Programs: train.py and model.py folded to the code of a stage, diffs between stages, and the pages that show them."""
