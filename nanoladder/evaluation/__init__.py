"""Evaluation of a finished model: the loss over a whole split, and tasks with right and wrong answers.

- score: log-probabilities of targets in rows of tokens, in batches with little padding, divided among processes
- split: a dataset split as rows that predict every target once
- items: task files and their format
- tasks: items as rows, and accuracies computed from their scores

Not here: the validation loss during training (train.py), and loading a model (nanoladder/checkpoint).
"""

from nanoladder.evaluation.score import Scorer
from nanoladder.evaluation.split import WholeSplit
from nanoladder.evaluation.tasks import Task
