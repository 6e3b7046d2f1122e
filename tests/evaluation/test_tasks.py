"""Tasks agree with transformers, one item after the other without padding, to the last item."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import LINE, tiny
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast

from model import GPT
from nanoladder import checkpoint
from nanoladder.data.tokenizer import build_tokenizer
from nanoladder.errors import BadInput
from nanoladder.evaluation import Scorer, Task, read_items

CPU = torch.device("cpu")
SHAPE = {"n_layer": 2, "n_head": 3, "n_embd": 24, "n_positions": 29}
WORDS = "the cat sat on a mat, naïve café ☕ \n\n it's 1234 He said: “Meow!” (quietly). [title] ..."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A GPT-2 of random weights and a tokenizer trained on a line, as transformers saves them."""
    folder = tmp_path_factory.mktemp("gpt2")
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([LINE * 10], vocab_size=300, special_tokens=["<|endoftext|>"])
    trained.save_model(str(folder))
    tokenizer = GPT2TokenizerFast.from_pretrained(folder)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), initializer_range=0.1, **SHAPE)
    model = GPT2LMHeadModel(config)
    model.transformer.wte.weight.data *= 10  # the likeliest token is often the last one again
    model.save_pretrained(folder)
    return folder


class Reference:
    """A straightforward evaluation by transformers."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def score(self, context, ending):
        """Log-probabilities of the ending's tokens after the context and a space, and if it is the greedy one."""
        context, ending = (self.tokenizer(text).input_ids for text in (context, " " + ending))
        ids = (context + ending)[-self.model.config.n_positions - 1 :]
        logits = self.model(torch.tensor([ids[:-1]])).logits[0, -len(ending) :]
        log_probs = logits.double().log_softmax(-1)[range(len(ending)), ending]
        return log_probs, logits.argmax(-1).tolist() == ending


def texts(rng, longest):
    return " ".join(rng.choice(WORDS.split(" "), rng.integers(1, longest))).strip() or "the"


def endings(rng, n):
    """n texts that differ: of equal ones the last bit decides."""
    return list(dict.fromkeys(texts(rng, 4) for _ in range(n + 9)))[:n]


def write(path, items):
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return path


def evaluate(folder, path, batch_tokens=200):
    """evaluate.py's figures for a folder of transformers."""
    source = f"hf:{folder}"
    model = checkpoint.load_gpt(source)
    tokenizer = checkpoint.tokenizer_of(source, model.config.vocab_size)
    task = Task(path, read_items(path), tokenizer, model.config.context_length)
    return task.evaluate(Scorer(model, "float32", CPU, batch_tokens))


def test_choices_agree_with_transformers(folder, tmp_path):
    rng = np.random.default_rng(0)
    items = [
        {
            "ctx": texts(rng, 20),
            "endings": endings(rng, n),
            "label": int(rng.integers(n)),
        }
        for n in rng.integers(2, 6, 60)
    ]
    found, reference = evaluate(folder, write(tmp_path / "choices.jsonl", items)), Reference(folder)
    right = {"chosen": 0, "chosen_per_token": 0, "chosen_per_byte": 0}
    for item, own in zip(items, found["details"], strict=True):
        scores = [reference.score(item["ctx"], ending)[0] for ending in item["endings"]]
        assert own["log_probs"] == pytest.approx([float(score.sum()) for score in scores], abs=1e-4)
        assert own["tokens"] == [len(score) for score in scores]
        expected = {
            "chosen": int(np.argmax([score.sum() for score in scores])),
            "chosen_per_token": int(np.argmax([score.mean() for score in scores])),
            "chosen_per_byte": int(
                np.argmax([s.sum() / len(e.encode()) for s, e in zip(scores, item["endings"], strict=True)])
            ),
        }
        assert {key: own[key] for key in expected} == expected and own["label"] == item["label"]
        right = {key: n + (expected[key] == item["label"]) for key, n in right.items()}
    for key, n in right.items():
        assert found[key.replace("chosen", "accuracy")] == n / 60
    assert len(set(right.values())) > 1  # the three ways differ
    cut = [len(reference.tokenizer(item["ctx"]).input_ids) for item in items]
    assert (found["contexts_cut"] > 0) == (max(cut) > reference.model.config.n_positions)


def test_last_words_agree_with_transformers(folder, tmp_path):
    rng = np.random.default_rng(1)
    items = [{"text": f"{texts(rng, 20)} {texts(rng, 2)}"} for _ in range(40)]
    items += [{"text": " ".join([word] * 6)} for word in ("the", "cat", "sat", "on", "mat,", "naïve", "☕")]
    found, reference = evaluate(folder, write(tmp_path / "words.jsonl", items)), Reference(folder)
    nats, right = 0.0, []
    for item, own in zip(items, found["details"], strict=True):
        context, _, word = item["text"].rpartition(" ")
        log_probs, greedy = reference.score(context.rstrip(), word)
        assert own["log_prob"] == pytest.approx(float(log_probs.sum()), abs=1e-4)
        assert own["right"] == greedy
        nats -= float(log_probs.sum())
        right.append(greedy)
    assert any(right) and not all(right)
    assert found["accuracy"] == np.mean(right)
    assert found["accuracy_stderr"] == pytest.approx(np.std(right, ddof=1) / math.sqrt(len(right)))
    assert found["perplexity"] == pytest.approx(math.exp(nats / len(items)), rel=1e-5)


def of_bytes(path, context_length=16, batch_tokens=200):
    model = GPT(tiny(vocab_size=256, context_length=context_length))
    task = Task(path, read_items(path), build_tokenizer("byte"), context_length)
    return task, task.evaluate(Scorer(model, "float32", CPU, batch_tokens))


def test_a_context_is_cut_from_the_left_and_leaves_room_for_the_ending(tmp_path):
    """16 inputs: of the ending's 10 tokens all but the last, and 7 of the context."""
    path = write(tmp_path / "words.jsonl", [{"text": "0123456789 abcdefghi"}, {"text": "3456789 abcdefghi"}])
    task, found = of_bytes(path)
    assert [bytes(row.tolist()) for row in task.rows] == [b"3456789 abcdefghi"] * 2
    assert found["contexts_cut"] == 1
    inputs, targets = task.read(np.array([0]))
    assert bytes(inputs[0].tolist()) == b"3456789 abcdefgh" and bytes(targets[0, 6:].tolist()) == b" abcdefghi"
    assert (targets[0, :6] == -100).all()


def test_a_longer_ending_is_refused_with_its_line(tmp_path):
    path = write(tmp_path / "words.jsonl", [{"text": "a b"}, {"text": "ab " + "c" * 16}])
    with pytest.raises(BadInput, match=r"words.jsonl line 2: an ending of 17 tokens; expected at most .*=16"):
        of_bytes(path)


def test_an_unknown_character_is_refused_with_its_line(tmp_path):
    path = write(tmp_path / "words.jsonl", [{"text": "a b"}, {"text": "a q"}])
    with pytest.raises(BadInput, match=r"words.jsonl line 2: character 'q'"):
        Task(path, read_items(path), build_tokenizer("char", ["a b"]), 16)
