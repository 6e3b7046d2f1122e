"""Answers windows of tokens with a model's logits: python -m lab.research.serve WEIGHTS T V

The referee runs it in a contestant's copy, with the contestant's code. stdin: windows of T token ids, int64, without
targets. stdout: the logits of each, (T, V) float32.
"""

import os
import sys

import torch


@torch.inference_mode()
def main(weights, *shape):
    T, V = map(int, shape)
    answers = open(os.dup(1), "wb")  # noqa: SIM115 open until the end
    os.dup2(2, 1)  # what the contestant's code prints is no answer
    from nanoladder import checkpoint  # prints what it likes

    model = checkpoint.load_gpt(weights).eval()
    while window := sys.stdin.buffer.read(8 * T):
        tokens = torch.frombuffer(bytearray(window), dtype=torch.int64)[None]  # (1, T)
        logits = model.logits(tokens)[0, :, :V]  # without padding
        if logits.shape != (T, V):
            sys.exit(f"error: logits{tuple(logits.shape)}; expected {T, V}")
        answers.write(logits.float().numpy().tobytes())
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
