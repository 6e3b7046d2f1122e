"""Worker of test_loss.py: the loss of a vocabulary that is cut over the processes. Writes its errors to argv[1]."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from kernels.test_loss import error, exact, inputs, with_gradients

from nanoladder.kernels import head_loss

dist.init_process_group("gloo")
rank, group = dist.get_rank(), dist.group.WORLD.group_name
hidden, weight, targets = inputs(n_tokens=20, n_vocab=70, padding=30)
rows = slice(25 * rank, 25 * rank + 25)


def sharded(hidden, weight):
    return 3 * head_loss(hidden, weight[rows], targets, 70, 3, first_row=rows.start, group=group)


found = dict(zip(("loss", "hidden", "weight"), with_gradients(sharded, hidden, weight), strict=True))
expected = dict(zip(found, exact(hidden, weight, targets, 70, scale=3), strict=True))
dist.all_reduce(found["hidden"])
expected["weight"][: rows.start] = expected["weight"][rows.stop :] = 0
with torch.no_grad():
    found["evaluated"], expected["evaluated"] = sharded(hidden, weight), expected["loss"]
errors = {name: error(found[name], expected[name]) for name in found}
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(errors))
dist.barrier()
dist.destroy_process_group()
