"""evaluate.py scores a run or an external model on datasets and tasks; several processes give the same figures."""

import json
import re
from pathlib import Path

import pytest
from conftest import LINE, replace, write_folder
from processes import script

import convert
import evaluate
from nanoladder import checkpoint
from nanoladder.data import open_dataset
from nanoladder.data.counting import counted_losses
from nanoladder.tokenizer.encoding import build_tokenizer

CHOICES = [
    {"ctx": "the cat sat on", "endings": ["the mat", "the cat", "café"], "label": 0},
    {"ctx": "the cat sat on the mat, naïve at", "endings": ["the", "the café"], "label": 1},
]
WORDS = [{"text": "the cat sat on the mat"}, {"text": LINE}]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder, paths = tmp_path_factory.mktemp("tasks"), []
    for name, items in (("choices", CHOICES), ("words", WORDS)):
        paths.append(folder / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return paths


@pytest.fixture
def report(run_main, tmp_path):
    """report(*words): the report of an evaluation in float32, and its output."""

    def run(*words):
        path = tmp_path / "report.json"
        result = run_main(evaluate.main, "--device=cpu", "--dtype=float32", f"--output={path}", *words)
        assert result.code == 0 and result.err == ""
        return json.loads(path.read_text()), result.out

    return run


def test_a_run_is_evaluated_on_its_whole_dataset(trained, report):
    result, out = report(f"--out_dir={trained.out_dir}")
    path, n_tokens = Path(trained.out_dir) / "best.safetensors", (Path(trained.dataset) / "val.bin").stat().st_size // 2
    ((name, figures),) = result["results"].items()
    assert name == f"{Path(trained.dataset).name} val" and figures["targets"] == n_tokens - 1
    best = checkpoint.load(path)["progress"]
    assert figures["loss"] == pytest.approx(best["best_val_loss"], rel=0.02)  # except for the last, partial window
    assert result["model"] == {
        **{"source": str(path), "step": best["step"], "context_length": 16},
        "parameters": checkpoint.load_gpt(path).n_params,
    }
    assert f"{figures['loss']:.4f}" in out and f"{n_tokens - 1} targets" in out
    counted, bits = figures["counted"], figures["bits_per_byte"] / figures["loss"]
    assert 0 < counted["trigrams"] < counted["bigrams"] < counted["unigrams"]
    dataset = open_dataset(trained)
    whole = counted_losses(dataset, replace(trained, eval_windows=0))  # without the last, partial window
    assert counted == pytest.approx(whole, rel=0.05)
    assert all(f"{loss * bits:.4f} bits per byte" in out for loss in counted.values()) and len(counted) == 4


def test_a_model_of_transformers_is_evaluated_like_the_run_it_was_converted_from(
    trained, tasks, tmp_path, run_main, report
):
    folder = tmp_path / "gpt2"
    assert run_main(convert.main, f"--out_dir={trained.out_dir}", "--to=hf", f"--output={folder}").code == 0
    words = [f"--dataset={trained.dataset}", "--tasks", *tasks]
    ours, _ = report(f"--out_dir={trained.out_dir}", *words)
    theirs, _ = report(f"--model=hf:{folder}", *words)
    del ours["results"][f"{Path(trained.dataset).name} val"]["counted"]  # of a run on its own data alone
    assert theirs.pop("model") == {**ours.pop("model"), "source": f"hf:{folder}", "step": None}
    assert theirs == ours


def test_the_last_checkpoint_the_training_split_and_a_shorter_context_can_be_requested(trained, report):
    words = [f"--out_dir={trained.out_dir}", "--checkpoint=last", "--split=train", "--context_length=8", "--stride=3"]
    found, _ = report(*words)
    assert found["model"]["step"] == 30 and found["model"]["context_length"] == 8 and found["settings"]["stride"] == 3
    assert list(found["results"]) == [f"{Path(trained.dataset).name} train"]
    assert "counted" not in found["results"][f"{Path(trained.dataset).name} train"]  # of the same tokens


def test_tasks_alone_and_beside_a_dataset(trained, tasks, report):
    words = [f"--out_dir={trained.out_dir}", "--tasks", *tasks]
    alone, out = report(*words)
    choices, last_words = (alone["results"][str(path)] for path in tasks)
    assert list(alone["results"]) == [str(path) for path in tasks]
    assert (choices["items"], last_words["items"]) == (2, 2) and last_words["contexts_cut"] == 2
    assert "accuracy per byte" in out and "2 contexts cut" in out
    both, _ = report(*words, f"--dataset={trained.dataset}")
    assert both["results"].pop(f"{Path(trained.dataset).name} val") and both == alone


@pytest.mark.slow
def test_several_processes_give_the_same_figures(trained, tasks, dense, report, tmp_path):
    words = ["--batch_tokens=64", f"--out_dir={trained.out_dir}", f"--dataset={dense}", "--tasks", *tasks]
    alone, _ = report(*words)
    words += ["--device=cpu", "--dtype=float32", f"--output={tmp_path / 'both.json'}"]
    result = script("evaluate.py", *words, n=2, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("accuracy per token") == 1
    both = json.loads((tmp_path / "both.json").read_text())
    assert alone["settings"].pop("processes") == 1 and both["settings"].pop("processes") == 2
    assert agree(alone, both)  # not to the last bit, which may depend on the rows of a batch


def agree(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(agree(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(agree, a, b))
    return a == pytest.approx(b, rel=1e-5) if isinstance(a, float) else a == b


# -- bad input


def test_a_dataset_with_another_tokenizer_is_refused(trained, tmp_path, refused):
    other = build_tokenizer("char", [LINE.replace("t", "d")])
    folder = write_folder(tmp_path / "other", [1] * 40, [1] * 40, other.n_vocab, encoding=other, tokenizer="char")
    line = refused(evaluate.main, f"--out_dir={trained.out_dir}", f"--dataset={folder}")
    assert "has another tokenizer (char" in line


def test_out_of_memory_is_one_line_and_code_3(trained, run_main, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(evaluate.evaluation.Scorer, "score", fail)
    result = run_main(evaluate.main, f"--out_dir={trained.out_dir}")
    assert result.code == 3 and re.fullmatch(r"error: out of memory; .*--batch_tokens below 16384\n", result.err)
