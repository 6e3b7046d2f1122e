"""A model that no process holds whole: its initial weights, and the memory of starting, saving and resuming."""

import ctypes
import resource
import threading
from itertools import count
from pathlib import Path

import pytest
import torch
from conftest import RECIPE, UNCUT, rows, saved, tiny, words
from processes import configuration

import train
from lab.measure.launch import run_together
from model import GPT
from nanoladder import checkpoint, parallel
from nanoladder.machine import proc_bytes
from nanoladder.machine.memory import GLIBC

pytestmark = pytest.mark.slow

PADDED = {"pad_vocab_to": 64, "bias": True, "position": "rotary"}
LAYOUTS = {
    "shards": {**RECIPE, "shard": "full", "pad_vocab_to": 64},
    "shards, tied": {**PADDED, "shard": "full", "attention": "matmul"},
    "tensor": {**UNCUT, "tensor_parallel": 2, "bias": True},
    "tensor and shards, tied": {"tensor_parallel": 2, "shard": "full", "pad_vocab_to": 64, "bias": True},
    "pipeline, tied": {"pipeline_parallel": 2, "pad_vocab_to": 64, "bias": True},
    "pipeline and tensor, tied": {"pipeline_parallel": 2, "tensor_parallel": 2, "pad_vocab_to": 64, "bias": True},
}


def find_differences(layouts):
    """{layout: names of the weights and buffers that are not bit-identical to those of a single process}."""
    found = {}
    for name, keys in layouts.items():
        config = tiny(vocab_size=17, ddp=True, **keys)
        model, alone = train.build_model(config, train.set_up(config)), GPT(config)
        weights, expected = checkpoint.gather_weights(model), alone.state_dict()
        if parallel.rank() == 0:
            absent = {"head.weight"} if config.tie_embeddings else set()
            assert weights.keys() == expected.keys() - absent
        found[name] = [key for key, weight in weights.items() if weight is not None and not weight.equal(expected[key])]
        for part in getattr(model, "parts", [model]):
            buffers = {key: parallel.full_tensor(buffer) for key, buffer in part.named_buffers()}
            found[name] += [key for key, buffer in buffers.items() if not buffer.equal(alone.get_buffer(key))]
            if config.tie_embeddings and hasattr(part, "head") and hasattr(part.token_embedding, "weight"):
                assert part.head.weight is part.token_embedding.weight
    return found


def test_the_initial_weights_are_those_of_one_process_under_every_layout(tmp_path):
    for found in run_together(find_differences, LAYOUTS, n=4, folder=tmp_path):
        assert not any(found.values()), found


# -- memory

BIG = {"n_layer": 48, "n_embd": 256}
BYTES = 4 * 48 * 12 * 256**2  # size of its blocks' matrices: 151 MB
M_MMAP_THRESHOLD = -3  # from glibc's malloc.h


def resident(field="VmRSS"):
    return proc_bytes("/proc/self/status", field)


def peaks_of(argv):
    """Trains for one step. Returns the peaks of resident memory until this step and until the end, above the start's.

    In bytes. Files mapped into memory do not count, nor do fragments of the heap: freed tensors go back to the system.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    start, peak, until_step, ended, step = resident("RssAnon"), 0, None, threading.Event(), train.train_step

    def watch():
        nonlocal peak
        while not ended.wait(1e-2):
            peak = max(peak, resident("RssAnon"))

    def train_step(*arguments):
        nonlocal until_step
        until_step = peak - start
        return step(*arguments)

    train.train_step = train_step
    thread = threading.Thread(target=watch)
    thread.start()
    train.main(argv)
    ended.set()
    thread.join()
    return until_step, peak - start


@pytest.mark.skipif(not GLIBC, reason="needs glibc's allocator, and /proc")
def test_no_process_holds_a_whole_model_while_it_starts_saves_or_resumes(dense, documents, tmp_path):
    """Limits the peak of each of four processes, beyond that of a tiny model, to a share of the whole model's bytes.

    A process starts with a quarter of the weights, and resumes with a quarter of the momentum, too. A step adds a
    quarter of the gradients and, briefly, a few gathered blocks; saving adds a copy of a quarter of the weights and of
    the momentum.
    """
    peaks = {}
    for name, keys in {"tiny": {}, "big": BIG}.items():
        keys |= {"shard": "full", "optimizer": "sgd", "max_steps": 1}
        config = configuration(dense, documents, tmp_path / name, **keys)
        for part, more in {"start": [], "resume": ["--init_from=resume", "--max_steps=2"]}.items():
            found = run_together(peaks_of, words(config) + more, n=4, folder=tmp_path)
            peaks[name, part] = torch.tensor(found).amax(0)
    assert saved(config)["progress"]["step"] == 2
    for part, until_step in {"start": 0.4, "resume": 0.7}.items():
        beyond = (peaks["big", part] - peaks["tiny", part]) / BYTES
        assert beyond[0] < until_step and beyond[1] < 1.4, (part, beyond)


# -- a full disk


def train_with_a_full_disk(argv, until):
    """Trains; before step `until`, rank 0 cannot write files larger than 50 kB."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    step, numbers = train.train_step, count(1)

    def call(*arguments):
        if next(numbers) == until:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        return step(*arguments)

    if parallel.rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, most))
    train.train_step = call
    train.main(argv)


def test_processes_keep_training_when_the_disk_is_full_and_save_once_there_is_room(dense, documents, tmp_path):
    config = configuration(dense, documents, tmp_path / "run", save_interval=2, shard="full")
    run_together(train_with_a_full_disk, words(config), until=4, n=2, folder=tmp_path, seconds=100)
    warnings = (tmp_path / "stderr").read_text().splitlines()
    assert [line for line in warnings if "warning: the checkpoint of step 2 is not saved: [Errno 27]" in line]
    assert len(rows(config)) == 6 and saved(config)["progress"]["step"] == 6
    names = sorted(path.name for path in Path(config.out_dir).glob("*.safetensors"))
    assert names == ["last.safetensors", "step_00000004.safetensors", "step_00000006.safetensors"]
    assert all(torch.isfinite(weight).all() for weight in saved(config)["model"].values())
