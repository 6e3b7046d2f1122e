"""Lightning: our plain model under its Trainer. It has no GPT of its own, so the difference from naive is its loop."""

import dataclasses

import lightning
import torch

from model import IGNORE
from nanoladder.data import count_workers
from train import build_optimizer


def train(task):
    """Trains until the clock ends it. Returns the setting as text."""
    task.clock.start()
    precision = {"float32": "32-true", "bfloat16": "bf16-mixed", "float16": "16-mixed"}
    precision = precision[task.dtype if task.best else "float32"]
    workers = count_workers(task.config.num_workers, task.device) if task.best else 0
    pinned = task.best and task.device.type == "cuda"
    if pinned:
        torch.set_float32_matmul_precision("high")  # as it asks for on a GPU that has TF32
    trainer = lightning.Trainer(
        accelerator="cpu" if task.device.type == "cpu" else "gpu",
        devices=1,
        precision=precision,
        gradient_clip_val=task.naive.grad_clip,
        max_epochs=1,
        default_root_dir=task.folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(task), task.loader(num_workers=workers, pin_memory=pinned))
    setting = [lightning.__version__, f"precision={precision}"]
    return ", ".join(setting + ["torch.compile", "sdpa", f"num_workers={workers}"] * task.best)


class Module(lightning.LightningModule):
    """The naive model, at its best with PyTorch's fused attention, compiled; AdamW as PyTorch's default has it.

    Tells the clock of each step's end, and ends the training when the clock says so. Lightning does not clip the
    gradients of a fused AdamW in mixed precision.
    """

    def __init__(self, task):
        super().__init__()
        self.clock = task.clock
        self.gpt = task.model(attention="sdpa") if task.best else task.model()
        self.forward_loss = torch.compile(self.gpt) if task.best else self.gpt

    def training_step(self, batch, _):
        inputs, targets = batch
        return self.forward_loss(inputs, targets) / (targets != IGNORE).sum()

    def configure_optimizers(self):
        optimizer = build_optimizer(self.gpt, dataclasses.replace(self.gpt.config, adamw_impl="forloop"))
        for group in optimizer.param_groups:
            group.update(foreach=None, fused=None)  # PyTorch chooses by the device
        return optimizer

    def on_train_batch_end(self, outputs, *_):
        self.trainer.should_stop = self.clock.step(outputs["loss"])
