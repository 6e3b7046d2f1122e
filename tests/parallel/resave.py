"""A program for tests/parallel/worker.py: loads the run in out_dir, saves it anew as resaved.safetensors."""

from pathlib import Path

from nanoladder import checkpoint, data, parallel
from nanoladder.run import Run
from train import build_model, build_optimizer, set_up


def train(config):
    run, device = Run(config), set_up(config)
    config = run.resolve(data.open_dataset(config), device)
    model = build_model(config, device)
    optimizer = build_optimizer(model, config)
    path, state = checkpoint.newest(config.out_dir)
    progress = checkpoint.resume(model, optimizer, state, path)
    state = checkpoint.snapshot(config, state["tokenizer"], model, optimizer, progress)
    if parallel.rank() == 0:
        checkpoint.write_file(Path(config.out_dir, "resaved.safetensors"), state)
