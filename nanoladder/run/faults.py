"""Faults that end a run with one line: a loss, gradient or state that is not finite, or an error of torch.compile."""

import math
import shlex
import sys
from typing import Any

import torch

from nanoladder import checkpoint, parallel
from nanoladder.private import loaded_compiler

LOOK = 100  # most steps between two looks at the numbers on a GPU
FAR = 2  # times the loss of guessing, ln(vocab_size): a loss above it means that the run has diverged
SMALLEST_SCALE = 1.0  # below this loss scale the gradients themselves overflow float16


class Watch:
    """Collects the losses and gradient norms of recent steps and ends the run at the first fault.

    A fault is a non-finite loss or gradient norm, a collapsed loss scale, or a gradient norm of exactly 0 at a nonzero
    loss: nothing is learned. The numbers may still be on a GPU; looking at them synchronizes with it.
    """

    def __init__(self, config, device, scaler):
        self.config, self.device, self.scaler = config, device, scaler
        self.steps, self.newest = [], None
        self.was_far = False  # a loss of this run was

    def check(self, step, lr, loss, grad_norm, due):
        """Ends the run if this step or one since the last look was faulty. Looks at CUDA if due or after LOOK steps."""
        self.newest = step, lr, loss, grad_norm
        self.steps.append(self.newest)
        if self.device.type == "cuda" and not due and len(self.steps) < LOOK:
            return
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else None
        for step, lr, loss, grad_norm in self.steps:
            loss, grad_norm = float(loss), float(grad_norm)
            self.was_far |= self.is_far(loss)
            overflowed = scale is None and not math.isfinite(grad_norm)  # the scaler skips such a step
            nothing_learned = grad_norm == 0 and loss != 0
            if not math.isfinite(loss) or overflowed or nothing_learned:
                self.stop(step, lr, loss, grad_norm)
        if scale is not None and scale < SMALLEST_SCALE:
            self.stop(step, lr, loss, grad_norm, f", loss scale {scale:.3g}, which collapsed")
        self.steps.clear()

    def check_evaluation(self, val_loss):
        """Ends the run if the validation loss, the same in all processes, is not finite. Collective."""
        if not math.isfinite(val_loss):
            self.stop(*self.newest, also=f", validation loss {val_loss}")

    def check_state(self, model, optimizer):
        """Ends the run if a weight or optimizer state is not finite after the newest step. Collective.

        The loss and the gradients of a step can be finite and its update still overflow.
        """
        if name := checkpoint.find_not_finite(model, optimizer):
            self.stop(*self.newest, also=f"; its update made {name} not finite")

    def is_far(self, loss):
        """True for a loss so far above that of guessing that the weights must be useless."""
        return loss > FAR * math.log(self.config.vocab_size)

    def warn_at_end(self):
        """Warns if the newest step's loss is finite and absurd, which would otherwise end as any other run does."""
        if self.newest and parallel.rank() == 0 and self.is_far(loss := float(self.newest[2])):
            guessing = math.log(self.config.vocab_size)
            print(
                f"warning: the run has diverged: its last loss is {loss:,.1f}, and guessing has {guessing:.2f}; "
                f"learning_rate={self.config.learning_rate} is too high, or the warm-up too short",
                file=sys.stderr,
            )

    def stop(self, step, lr, loss, grad_norm, also=""):
        """Ends the run with one line: step, likely causes, replay command. Collective."""
        loss, grad_norm = float(loss), float(grad_norm)
        causes = f"learning_rate={self.config.learning_rate} is too high, the warm-up too short, or the data damaged"
        if grad_norm == 0 and not self.was_far:  # huge weights give gradients of 0 too, at any loss
            cure = " (try --compile=False)" if self.config.compile else ""
            causes = f"torch {torch.__version__} loses the gradients{cure}, or all weights are 0"
        line = (
            f"error: stopped at step {step}: loss {loss}, gradient norm {grad_norm}, learning rate {lr:.3g}{also}. "
            f"Nothing was saved since. Likely causes: {causes}. To find its origin: "
            f"python -m lab.replay --step={step} {shlex.join(sys.argv[1:])}"
        )
        if parallel.rank() == 0:
            print(line, file=sys.stderr, flush=True)
        parallel.gather_objects(step)  # the first process to exit ends the others, so wait until all are here
        sys.exit(1)


def explain_compiler_failure(error: BaseException, config: Any) -> None:
    """Exits with one line if the error comes from torch.compile."""
    dynamo = loaded_compiler()
    if config.compile and dynamo and isinstance(error, dynamo.exc.TorchDynamoException):
        reason = str(getattr(error, "inner_exception", error)).strip().splitlines()[0]
        sys.exit(f"error: torch.compile failed: {reason}; --compile=False turns it off")
