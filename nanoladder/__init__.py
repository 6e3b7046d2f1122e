"""What the training loop stands on: a room for each subject, each with a docstring that says what lives in it."""
