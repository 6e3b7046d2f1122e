"""Worker of test_parts.py: attention and activations where 4 processes share a sequence. Writes what it saw."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.tensor.debug import CommDebugMode

sys.path.insert(0, str(Path(__file__).parents[1]))
from conftest import tiny

from lab.trace import Ledger
from model import GPT
from nanoladder import parallel
from nanoladder.parallel.context import positions

N = 4


class Sent(CommDebugMode):
    """Counts collectives, and the numbers that this process sends to others."""

    def __enter__(self):
        self.numbers = {}
        return super().__enter__()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.__name__.partition(".")[0]
        if name in ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"):
            sent = args[0].numel() * (N - 1) // (1 if name == "all_gather_into_tensor" else N)
            self.numbers[name] = self.numbers.get(name, 0) + sent
        return super().__torch_dispatch__(operator, types, args, kwargs)


def attention(n_head, **keys):
    """Largest errors of a process's output and gradients, and the numbers that it sends in forward and backward."""
    config = tiny(n_head=n_head, context_parallel=N, vocab_size=8, ddp=True, **keys)
    parallel.start(config, torch.device("cpu"))
    whole = GPT(config)
    parallel.apply_context_parallel(whole)
    shape = (4, 2, n_head, config.context_length, 8)  # q, k, v and the gradient of the output
    tensors = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own = positions(config)
    expected = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
    y = F.scaled_dot_product_attention(*expected, is_causal=True)
    (y * tensors[3]).sum().backward()
    found = [tensor[:, :, own].clone().requires_grad_() for tensor in tensors[:3]]
    with Sent() as sent:
        ours = whole.blocks[0].attention.attend(*found)
        forward = dict(sent.numbers)
        (ours * tensors[3][:, :, own]).sum().backward()
    backward = {name: n - forward.get(name, 0) for name, n in sent.numbers.items()}
    errors = [(ours - y[:, :, own]).detach().abs().max()]
    errors += [(f.grad - e.grad[:, :, own]).abs().max() for f, e in zip(found, expected, strict=True)]
    counts = {str(operator).rpartition(".")[2]: n for operator, n in sent.get_comm_counts().items()}
    return {"errors": [float(error) for error in errors], "forward": forward, "backward": backward, "counts": counts}


def activations(n_head, context_parallel):
    """Bytes that the forward of a model keeps for the backward in this process, for each sequence."""
    keys = {"n_layer": 4, "context_length": 64, "vocab_size": 64, "attention": "sdpa", "ddp": True}
    config = tiny(n_head=n_head, context_parallel=context_parallel, **keys)
    parallel.start(config, torch.device("cpu"))
    model = GPT(config)
    parallel.apply_context_parallel(model)
    kept = []
    for n_sequences in (1, 2):
        tokens = torch.zeros(n_sequences, config.context_length // context_parallel, dtype=torch.int64)
        with Ledger(on_cuda=False) as ledger:
            loss = model(tokens, tokens)
            time.sleep(1)  # gloo's threads hold the tensors of an exchange until a moment after it
            kept.append(ledger.now)
        del loss
    return kept[1] - kept[0]


found = {
    "heads": attention(n_head=4, attention="matmul"),
    "keys": attention(n_head=2, attention="sdpa"),
    "activations": {name: [activations(n_head, n) for n in (1, N)] for name, n_head in (("heads", 4), ("keys", 2))},
}
Path(sys.argv[1], f"{parallel.rank()}.json").write_text(json.dumps(found))
parallel.stop()
