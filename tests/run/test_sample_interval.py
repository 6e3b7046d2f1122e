"""sample_interval prints a text during training, and does not change the training."""

import re

from conftest import replace, rows, same, saved, tiny, words, write_folder

import sample
import train
from nanoladder.run.sample import LENGTH

TEXT = re.compile(r"^step (\d+)  sample\n((?:    .*\n|\n)+)", re.MULTILINE)  # indented


def test_a_sample_is_sample_py_s_indented_and_changes_nothing(dense, tmp_path, run_main):
    """Dropout draws from the global random state in every step."""
    config = tiny(dataset=str(dense), out_dir=str(tmp_path / "run"), dropout=0.2, max_steps=8, log_interval=2)
    printed = run_main(train.main, *words(replace(config, sample_interval=4))).out
    ours, curve = saved(config), rows(config, "train_loss", "lr", "grad_norm")
    texts = dict(TEXT.findall(printed))
    options = "--checkpoint=last", "--device=cpu", "--dtype=float32", f"--seed={config.seed}"
    text = run_main(sample.main, f"--out_dir={config.out_dir}", *options, f"--max_new_tokens={LENGTH}").out
    assert list(texts) == ["4", "8"] and text.split() == texts["8"].split() and len(text) == LENGTH + 1
    without = replace(config, out_dir=str(tmp_path / "without"))
    assert not TEXT.findall(run_main(train.main, *words(without)).out)
    assert curve == rows(without, "train_loss", "lr", "grad_norm")
    assert all(same(ours[key], saved(without)[key]) for key in ("model", "optimizer", "generators"))


def test_data_without_a_tokenizer_are_refused(tmp_path, refused):
    folder = write_folder(tmp_path / "bare", [1, 2, 3] * 100, [1, 2, 3] * 20, 4, tokenizer="char")
    config = tiny(dataset=str(folder), out_dir=str(tmp_path / "run"), sample_interval=1)
    assert "no tokenizer to write samples" in refused(train.main, *words(config))
