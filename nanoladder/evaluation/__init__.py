"""Evaluation of a finished model: the loss over a whole split, and tasks with right and wrong answers.

- score: log-probabilities of the targets in rows of tokens, in batches of little padding that the processes share
- split: a split of a dataset as rows that predict every target once
- items: task files and their format
- tasks: their items as rows, and the accuracies that follow from the scores

Not here: the validation loss during training (train.py), and loading a model (nanoladder/checkpoint).
"""

from nanoladder.evaluation.score import Scorer
from nanoladder.evaluation.split import WholeSplit
from nanoladder.evaluation.tasks import Task
