"""A text prepared with the tokenizer of a run, a dataset or a model from elsewhere has the same token ids."""

import json
import pickle
import re

import numpy as np
import pytest
from conftest import LINE, contents, flags, refusal

import sample
import train
from data.text import prepare as own_text
from nanoladder.prepare.corpus import Texts
from nanoladder.prepare.writer import write_corpus
from nanoladder.tokenizer.encoding import END_OF_TEXT, EVERY_CHARACTER, encode, load_tokenizer, make_encoding
from nanoladder.tokenizer.existing import existing_tokenizer, name_or_place
from nanoladder.tokenizer.huggingface import to_huggingface

SECOND = "café at the mat, the hat"
SHIFTED = make_encoding("x", EVERY_CHARACTER, {bytes([i]): i + 1 for i in range(256)}, {END_OF_TEXT: 0})


def write_huggingface(folder):
    (folder / "tokenizer.json").write_text(json.dumps(to_huggingface(SHIFTED)))
    return SHIFTED


def write_nanogpt(folder):
    characters = sorted(set(LINE), reverse=True)  # in an order of its own
    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters))}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return existing_tokenizer(folder)


def write_own(folder):
    write_corpus(folder, Texts([LINE], [LINE]), "char")
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    "write, prefix", [(write_own, ""), (write_nanogpt, ""), (write_huggingface, "hf:"), (write_huggingface, "")]
)
def test_a_text_gets_the_ids_of_the_existing_tokenizer(write, prefix, tmp_path):
    """Hugging Face's also if a special token comes first."""
    (tmp_path / "first").mkdir()
    tokenizer = write(tmp_path / "first")
    place = f"{prefix}{tmp_path / 'first'}"
    meta = write_corpus(tmp_path / "second", Texts([SECOND], [SECOND[::-1]]), name_or_place(place))
    loaded, ids = load_tokenizer(tmp_path / "second"), np.fromfile(tmp_path / "second" / "train.bin", "<u2").tolist()
    end = [0] if tokenizer is SHIFTED else []
    assert ids == encode(tokenizer, SECOND) + end == encode(loaded, SECOND) + end
    assert meta["vocab_size"] == tokenizer.n_vocab and loaded.decode(ids).startswith(SECOND)


def test_another_existing_tokenizer_is_another_dataset(tmp_path):
    """Even if it lies in the same place: its ids are others."""
    place, texts = tmp_path / "first", Texts([SECOND], [SECOND])
    for first in (LINE, LINE + "z"):
        write_corpus(place, Texts([first], [first]), "char", overwrite=True)
        if first == LINE:
            write_corpus(tmp_path / "second", texts, str(place))
    before = contents(tmp_path / "second")
    assert "holds a dataset" in refusal(write_corpus, tmp_path / "second", texts, str(place))
    assert contents(tmp_path / "second") == before


@pytest.mark.parametrize("place", ["nowhere", "empty", "hf:empty", "bpe:12"])
def test_a_place_without_a_tokenizer_is_refused(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert place.removeprefix("hf:") in refusal(name_or_place, place)


def test_a_run_is_trained_further_on_a_second_text_by_the_command_that_a_refusal_names(
    trained, tmp_path, refused, run_main
):
    """Its tokenizer knows other characters than the text's own would."""
    (tmp_path / "second.txt").write_text(f"{SECOND}\n" * 90)
    own_text.main(["--input", f"{tmp_path}/second.txt", "--tokenizer=char", f"--out_dir={tmp_path}/own"])
    keys = {"init_from": f"{trained.out_dir}/best.safetensors", "out_dir": tmp_path / "run", "learning_rate": 1e-3}
    line = refused(train.main, *flags(**keys, dataset=tmp_path / "own", vocab_size=0))
    command = re.search(r"`python data/text/prepare.py (.+)`", line)[1]
    own_text.main(command.replace("FILES", f"{tmp_path}/second.txt").replace("FOLDER", f"{tmp_path}/data").split())
    result = run_main(train.main, *flags(**keys, dataset=tmp_path / "data", vocab_size=0))
    assert result.code == 0
    said = run_main(sample.main, f"--out_dir={tmp_path}/run", "--prompt=the", "--max_new_tokens=20", "--device=cpu")
    assert said.code == 0 and said.out.startswith("the")
