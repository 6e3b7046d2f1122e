"""Batches are a pure function of (seed, step), in any process or worker; a broken folder is refused."""

import pickle
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import tiny, write_folder
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from model import IGNORE
from nanoladder.data import WORKERS, Batch, TrainingBatches, ValidationBatches, open_dataset
from nanoladder.data import batches as batches_module
from nanoladder.data.batches import ROUNDS, permuted, shuffle

T = 8
VOCAB = 60_000


def config_of(folder, **keys):
    return tiny(**{"dataset": str(folder), "context_length": T, "eval_windows": 0, "seed": 1, **keys})


def open_ids(folder, train_ids, val_ids=None, dtype="uint16"):
    """A dataset of the given ids. If they are 0, 1, 2, ... each id equals its position in the file."""
    write_folder(folder, train_ids, val_ids or train_ids, VOCAB, dtype)
    return open_dataset(config_of(folder))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder that every hypothesis example overwrites."""
    return tmp_path_factory.mktemp("data") / "ids"


def counted(lengths):
    """Documents of these lengths that hold the ids 0, 1, 2, ... in order."""
    edges = np.cumsum([0, *lengths]).tolist()
    return [list(range(start, end)) for start, end in pairwise(edges)]


def together(batches):
    """All rows of several batches: inputs, targets."""
    return [torch.cat(tensors) for tensors in zip(*batches, strict=True)]


def stream(split, n_rows, batch_size, seed=1):
    """The first n_rows rows that training sees: inputs, targets."""
    batches = TrainingBatches(split, tiny(batch_size=batch_size, seed=seed))
    n_steps = -(-n_rows // batch_size)
    return [tensor[:n_rows] for tensor in together(batches[step] for step in range(1, n_steps + 1))]


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


sizes = st.integers(T + 1, 20 * T)
batch_sizes = st.integers(1, 9)
seeds = st.integers(0, 2**40)
document_lengths = st.lists(st.integers(2, 4 * T), min_size=1, max_size=9)


# -- a batch


@pytest.mark.slow
def test_a_dataloader_yields_the_same_batches(dense):
    config = config_of(dense)
    batches = TrainingBatches(open_dataset(config).train, config)
    assert len(pickle.dumps(batches)) < 5000  # a worker maps the file itself
    loader = DataLoader(batches, batch_size=None, sampler=range(1, 6), num_workers=2, **WORKERS)
    for step, batch in enumerate(loader, 1):
        assert type(batch) is Batch and equal(batch, batches[step])


# -- training


def test_a_batch_depends_only_on_seed_and_step(folder):
    split = open_ids(folder, list(range(500))).train
    batches = TrainingBatches(split, tiny(seed=1))
    first = [batches[step] for step in range(1, 41)]  # more than two epochs
    for step in random.Random(0).sample(range(1, 41), 40):
        torch.manual_seed(step)
        before = torch.get_rng_state()
        assert equal(batches[step], first[step - 1])
        assert torch.equal(torch.get_rng_state(), before)
        assert equal(TrainingBatches(split, tiny(seed=1))[step], first[step - 1])
    assert not equal(TrainingBatches(split, tiny(seed=2))[1], first[0])
    assert not equal(first[0], first[1])


@given(n_tokens=sizes, batch_size=batch_sizes, seed=seeds)
def test_an_epoch_visits_every_window_once_and_targets_are_the_next_tokens(folder, n_tokens, batch_size, seed):
    split = open_ids(folder, list(range(n_tokens))).train
    n = split.n_windows
    assert n == max(1, (n_tokens - T) // T)
    inputs, targets = stream(split, 3 * n, batch_size, seed)
    assert inputs.dtype == targets.dtype == torch.int64 and inputs.shape == targets.shape == (3 * n, T)
    assert (inputs == inputs[:, :1] + torch.arange(T)).all()  # consecutive in the file
    assert (targets == inputs + 1).all() and targets.max() < n_tokens
    for starts in inputs[:, 0].view(3, n):  # one row per epoch
        starts = starts.sort().values
        assert (starts == starts[0] + T * torch.arange(n)).all() and starts[0] < T


def test_every_epoch_has_a_new_order_and_a_new_phase(folder):
    split = open_ids(folder, list(range(400))).train
    inputs, targets = stream(split, 60 * split.n_windows, batch_size=5)
    epochs = inputs[:, 0].view(60, split.n_windows)
    assert {int(starts.min()) for starts in epochs} == set(range(T))  # each phase comes up in 60 epochs
    orders = {tuple(starts.sub(starts.min()).tolist()) for starts in epochs}
    assert len(orders) == 60
    assert set(targets.flatten().tolist()) == set(range(1, 400))  # every token of the file is reached


def order(n, seed, places=None):
    keys = np.random.default_rng(seed).integers(2**64, size=ROUNDS, dtype=np.uint64)
    return permuted(np.arange(n, dtype=np.uint64) if places is None else np.array(places, np.uint64), n, keys)


@given(n=st.integers(1, 3000), seed=seeds)
def test_an_order_is_a_permutation_and_can_be_computed_in_parts(n, seed):
    whole = order(n, seed)
    assert (np.sort(whole) == np.arange(n)).all()
    assert (order(n, seed, range(n // 3, n)) == whole[n // 3 :]).all()


def test_an_order_is_as_random_as_numpys():
    """Counts windows at each place, neighbors that stay neighbors, and windows that stay in place, in 1000 orders."""
    n, n_orders = 50, 1000
    found = np.array([order(n, seed) for seed in range(n_orders)]).astype(int)
    at = np.zeros((n, n))
    np.add.at(at, (np.arange(n), found), 1)
    expected = n_orders / n
    assert 0.9 < ((at - expected) ** 2 / expected).sum() / (n - 1) ** 2 < 1.1
    assert 0.85 < (np.diff(found) == 1).sum(axis=1).mean() < 1.15
    assert 0.85 < (found == np.arange(n)).sum(axis=1).mean() < 1.15


def test_batches_do_not_depend_on_the_size_of_the_blocks_of_an_order(folder, monkeypatch):
    batches = TrainingBatches(open_ids(folder, list(range(500))).train, tiny(batch_size=7, seed=3))
    expected = [batches[step] for step in range(1, 30)]
    monkeypatch.setattr(batches_module, "SHUFFLED", 5)
    shuffle.cache_clear()
    assert all(equal(batches[step], expected[step - 1]) for step in range(1, 30))
    shuffle.cache_clear()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", ["dense", "documents"])
def test_the_shares_of_all_processes_form_the_batch_in_order(folder, world_size, kind):
    ids = list(range(500)) if kind == "dense" else counted([3, 40, 2, 17, 9])
    whole = TrainingBatches(open_ids(folder, ids).train, tiny(batch_size=8, seed=3))
    ranks = [whole.share(rank, world_size) for rank in range(world_size)]
    for step in range(1, 21):
        shares = [batches[step] for batches in ranks]
        assert all(len(share.inputs) == 8 // world_size for share in shares)
        assert equal(together(shares), whole[step])
        assert [pair for batches in ranks for pair in batches.windows(step)] == whole.windows(step)


@given(lengths=document_lengths, batch_size=batch_sizes, seed=seeds)
def test_windows_never_cross_documents_and_every_target_comes_once_per_epoch(folder, lengths, batch_size, seed):
    documents = counted(lengths)
    split = open_ids(folder, documents).train
    n = split.n_windows
    assert n == sum(-(-(length - 1) // T) for length in lengths)  # a long one is split
    inputs, targets = stream(split, 2 * n, batch_size, seed)
    assert inputs.shape == targets.shape == (2 * n, T)
    document_of = {id: number for number, document in enumerate(documents) for id in document}
    for row_inputs, row_targets in zip(inputs.tolist(), targets.tolist(), strict=True):
        length = sum(target != IGNORE for target in row_targets)
        start = row_inputs[0]
        assert length >= 1
        assert row_inputs == [*range(start, start + length), *[0] * (T - length)]
        assert row_targets == [*range(start + 1, start + length + 1), *[IGNORE] * (T - length)]
        assert document_of[start] == document_of[start + length]
    every_target = sorted(id for document in documents for id in document[1:])
    for epoch in targets.view(2, -1):
        assert sorted(epoch[epoch != IGNORE].tolist()) == every_target


# -- validation


def validation(split, batch_size, n_windows=0):
    return ValidationBatches(split, tiny(batch_size=batch_size, eval_windows=n_windows))


@given(n_tokens=sizes, lengths=document_lengths, dense=st.booleans(), batch_size=batch_sizes)
def test_validation_counts_every_target_once(folder, n_tokens, lengths, dense, batch_size):
    ids = list(range(n_tokens)) if dense else counted(lengths)
    split = open_ids(folder, ids).val
    batches = list(validation(split, batch_size))
    assert all(batch.inputs.shape == batch.targets.shape == (batch_size, T) for batch in batches)
    assert len(batches) == -(-split.n_windows // batch_size)
    inputs, targets = together(batches)
    n = split.n_windows
    assert (targets[n:] == IGNORE).all() and (targets[:n] != IGNORE).any(dim=1).all()
    valid = targets != IGNORE
    assert (targets[valid] == inputs[valid] + 1).all()
    expected = range(1, n * T + 1) if dense else [id for document in ids for id in document[1:]]
    assert targets[valid].tolist() == list(expected)
    assert split.n_targets == (n_tokens - 1 if dense else valid.sum())
    assert all(equal(a, b) for a, b in zip(batches, validation(split, batch_size), strict=True))


@pytest.mark.parametrize("n_windows, expected", [(1, 1), (7, 7), (999, 49)])
def test_validation_windows_are_evenly_spaced(folder, n_windows, expected):
    split = open_ids(folder, list(range(50 * T))).val
    inputs, targets = together(validation(split, 4, n_windows))
    starts = inputs[(targets != IGNORE).any(dim=1), 0]
    gaps = starts.diff()
    assert len(starts) == expected and starts[0] == 0
    assert expected == 1 or (gaps.min() > 0 and gaps.max() - gaps.min() <= T)


def test_a_few_validation_windows_are_spread_over_the_whole_split(folder):
    split = open_ids(folder, list(range(40 * T + 1))).val
    assert validation(split, 4, n_windows=4).chosen.tolist() == [0, 9, 19, 29]  # of 39


@pytest.mark.parametrize("world_size, micro_batch_size, n_rows", [(1, 2, 2), (2, 0, 4), (4, 1, 1)])
@pytest.mark.parametrize("n_windows", [1, 37])
def test_every_process_validates_the_same_number_of_batches(folder, world_size, micro_batch_size, n_rows, n_windows):
    """Every process needs the same number of batches: one without a batch would leave the others waiting."""
    split = open_ids(folder, list(range(50 * T))).val
    config = tiny(batch_size=8, micro_batch_size=micro_batch_size, eval_windows=n_windows)
    whole = ValidationBatches(split, config)
    shares = [list(whole.share(rank, world_size)) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    assert {len(batch.inputs) for share in shares for batch in share} == {n_rows}
    seen, expected = (together(batches) for batches in ([batch for share in shares for batch in share], whole))
    starts = [sorted(inputs[targets[:, 0] != IGNORE, 0].tolist()) for inputs, targets in (seen, expected)]
    assert starts[0] == starts[1] and len(starts[0]) == n_windows


# -- datasets


def test_uint32_ids(folder):
    ids = list(range(70_000, 70_100))
    write_folder(folder, ids, ids, 100_000, dtype="uint32")
    dataset = open_dataset(config_of(folder))
    inputs, targets = stream(dataset.train, dataset.train.n_windows, 4)
    assert dataset.vocab_size == 100_000 and inputs.min() >= 70_000 and (targets == inputs + 1).all()
