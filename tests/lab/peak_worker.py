"""Worker that torchrun starts in tests/lab/test_predict.py: the peak bytes of this process's tensors in a step.

The least of several steps, as the thread of a collective sometimes frees its tensors a moment after the wait.

argv[1] is the folder for peak0.json and so on, the rest are words of a config.
"""

import json
import sys
from pathlib import Path

import torch

import train
from lab.trace import Ledger
from nanoladder import machine, parallel
from nanoladder.config import load_config
from nanoladder.data import Batch

config = load_config(sys.argv[2:])
device = train.set_up(config)
sizes = parallel.mesh().sizes
shape = 2, config.batch_size // sizes.data, config.context_length // sizes.context
ledger = Ledger(on_cuda=False)
with ledger.seeing_resizes(), ledger:
    model = train.build_model(config, device)
    optimizer = train.build_optimizer(model, config)
    scaler = machine.gradient_scaler(config.dtype, device)
    batch = Batch(*torch.randint(config.vocab_size, shape).unbind())
    peaks = []
    for _ in range(12):
        ledger.peak = 0
        train.train_step(model, optimizer, scaler, batch, 1e-3, config)
        peaks.append(ledger.peak)
Path(sys.argv[1], f"peak{parallel.rank()}.json").write_text(json.dumps(min(peaks[1:])))
parallel.stop()
