"""Program of test_tensor.py: train.train with a fault. What is gathered keeps the order of rows it has when cut."""

import train as script
from nanoladder.parallel import shards


def train(config):
    right, shards.by_process = shards.by_process, lambda rows, back=False: rows
    script.train(config)
    shards.by_process = right
