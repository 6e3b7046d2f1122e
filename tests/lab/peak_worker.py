"""Script of test_predict.py for two processes: the peak bytes of this process's tensors in a step.

The least of several steps, as the thread of a collective sometimes frees its tensors a moment after the wait.

argv[1] is a JSON file, a list of configs as words. The peaks go to peaks0.json and so on beside it.
"""

import json
import sys
from pathlib import Path

import torch

import train
from lab.trace import Ledger
from nanoladder import parallel
from nanoladder.data import Batch
from nanoladder.run import load_config


def peak(config):
    device = train.set_up(config)
    sizes = parallel.mesh().sizes
    shape = 2, config.batch_size // sizes.data, config.context_length // sizes.context
    ledger = Ledger(on_cuda=False)
    with ledger.seeing_resizes(), ledger:
        model = train.build_model(config, device)
        optimizer = train.build_optimizer(model, config)
        batch = Batch(*torch.randint(config.vocab_size, shape).unbind())
        peaks = []
        for _ in range(6):
            ledger.peak = 0
            train.train_step(model, optimizer, batch, 1e-3, config)
            peaks.append(ledger.peak)
    return min(peaks[1:])


path = Path(sys.argv[1])
found = [peak(load_config(words)) for words in json.loads(path.read_text())]
path.with_name(f"peaks{parallel.rank()}.json").write_text(json.dumps(found))
parallel.stop()
