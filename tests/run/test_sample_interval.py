"""sample_interval prints a line of text during training, and does not change the training."""

import ast
import re

from conftest import replace, rows, same, saved, tiny, words, write_folder

import sample
import train
from nanoladder.run.sample import LENGTH

LINE = re.compile(r"^step +(\d+)  sample (.*)$", re.MULTILINE)


def test_a_sample_is_sample_py_s_on_one_line_and_changes_nothing(dense, tmp_path, run_main):
    """Dropout draws from the global random state in every step."""
    config = tiny(dataset=str(dense), out_dir=str(tmp_path / "run"), dropout=0.2, max_steps=8, log_interval=2)
    printed = run_main(train.main, *words(replace(config, sample_interval=4))).out
    ours, curve = saved(config), rows(config, "train_loss", "lr", "grad_norm")
    texts = {int(step): ast.literal_eval(text) for step, text in LINE.findall(printed)}
    options = "--checkpoint=last", "--device=cpu", "--dtype=float32", f"--seed={config.seed}"
    text = run_main(sample.main, f"--out_dir={config.out_dir}", *options, f"--max_new_tokens={LENGTH}").out
    assert list(texts) == [4, 8] and text == texts[8] + "\n" and len(texts[8]) == LENGTH
    without = replace(config, out_dir=str(tmp_path / "without"))
    assert not LINE.findall(run_main(train.main, *words(without)).out)
    assert curve == rows(without, "train_loss", "lr", "grad_norm")
    assert all(same(ours[key], saved(without)[key]) for key in ("model", "optimizer", "generators"))


def test_data_without_a_tokenizer_are_refused(tmp_path, refused):
    folder = write_folder(tmp_path / "bare", [1, 2, 3] * 100, [1, 2, 3] * 20, 4, tokenizer="char")
    config = tiny(dataset=str(folder), out_dir=str(tmp_path / "run"), sample_interval=1)
    assert "no tokenizer to write samples" in refused(train.main, *words(config))
