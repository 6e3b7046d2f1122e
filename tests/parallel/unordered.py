"""Program of test_tensor.py: train.train with a fault. What is gathered keeps the order of rows it has when cut."""

import train as script
from nanoladder.parallel import whole


def train(config):
    right, whole.by_process = whole.by_process, lambda rows, back=False: rows
    script.train(config)
    whole.by_process = right
