"""Tasks agree on every item with transformers, which scores one at a time, without padding."""

import json
import math

import numpy as np
import pytest
import torch
import transformers
from conftest import LINE
from tokenizers import ByteLevelBPETokenizer

from nanoladder import checkpoint
from nanoladder.errors import BadInput
from nanoladder.evaluation import Scorer, Task
from nanoladder.tokenizer.encoding import build_tokenizer

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
    tokenizer = transformers.GPT2TokenizerFast.from_pretrained(folder)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=len(tokenizer), initializer_range=0.1, **SHAPE)
    model = transformers.GPT2LMHeadModel(config)
    model.transformer.wte.weight.data *= 10  # the likeliest token is often the last one again
    model.save_pretrained(folder)
    return folder


class Reference:
    """A straightforward evaluation by transformers."""

    def __init__(self, folder):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def score(self, context, ending):
        """Log-probabilities of the ending's tokens after the context and a space, and True if it is greedy."""
        context, ending = (self.tokenizer(text).input_ids for text in (context, " " + ending))
        ids = (context + ending)[-self.model.config.n_positions - 1 :]
        logits = self.model(torch.tensor([ids[:-1]])).logits[0, -len(ending) :]
        log_probs = logits.double().log_softmax(-1)[range(len(ending)), ending]
        return log_probs, logits.argmax(-1).tolist() == ending


def texts(rng, longest):
    return " ".join(rng.choice(WORDS.split(" "), rng.integers(1, longest))).strip() or "the"


def endings(rng, n):
    """n distinct texts: between equal ones, the last bit would decide."""
    return list(dict.fromkeys(texts(rng, 4) for _ in range(n + 9)))[:n]


def write(path, items):
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return path


def evaluate(folder, path):
    """Figures of evaluate.py for a model folder of transformers, and the scores of every ending."""
    source = f"hf:{folder}"
    state = checkpoint.load_model(source)
    model = checkpoint.build_gpt(state, source)
    task = Task(path, checkpoint.tokenizer_of(source, state), model.config.context_length)
    scorer = Scorer(model, "float32", CPU, 200)
    return task.evaluate(scorer), scorer.score("", task.lengths, task.read)


def test_choices_agree_with_transformers(folder, tmp_path):
    rng = np.random.default_rng(0)
    items = [
        {"ctx": texts(rng, 20), "endings": endings(rng, n), "label": int(rng.integers(n))}
        for n in rng.integers(2, 6, 60)
    ]
    found, found_scores = evaluate(folder, write(tmp_path / "choices.jsonl", items))
    reference, log_probs = Reference(folder), iter(found_scores.log_probs)
    right = dict.fromkeys(("accuracy", "accuracy_per_token", "accuracy_per_byte"), 0)
    for item in items:
        scores = [reference.score(item["ctx"], ending)[0] for ending in item["endings"]]
        assert [next(log_probs) for _ in scores] == pytest.approx([float(score.sum()) for score in scores], abs=1e-4)
        n_bytes = [len(ending.encode()) for ending in item["endings"]]
        by_size = {
            "accuracy": [score.sum() for score in scores],
            "accuracy_per_token": [score.mean() for score in scores],
            "accuracy_per_byte": [score.sum() / n for score, n in zip(scores, n_bytes, strict=True)],
        }
        for key, values in by_size.items():
            right[key] += int(np.argmax(values)) == item["label"]
    assert {key: found[key] * 60 for key in right} == pytest.approx(right)
    assert len(set(right.values())) > 1  # the three accuracies differ
    cut = [len(reference.tokenizer(item["ctx"]).input_ids) for item in items]
    assert (found["contexts_cut"] > 0) == (max(cut) > reference.model.config.n_positions)


def test_last_words_agree_with_transformers(folder, tmp_path):
    rng = np.random.default_rng(1)
    items = [{"text": f"{texts(rng, 20)} {texts(rng, 2)}"} for _ in range(40)]
    items += [{"text": " ".join([word] * 6)} for word in ("the", "cat", "sat", "on", "mat,", "naïve", "☕")]
    found, scores = evaluate(folder, write(tmp_path / "words.jsonl", items))
    reference, nats, right = Reference(folder), 0.0, []
    for item, log_prob in zip(items, scores.log_probs, strict=True):
        context, _, word = item["text"].rpartition(" ")
        log_probs, greedy = reference.score(context.rstrip(), word)
        assert log_prob == pytest.approx(float(log_probs.sum()), abs=1e-4)
        nats -= float(log_probs.sum())
        right.append(greedy)
    assert scores.greedy.tolist() == right and any(right) and not all(right)
    assert found["accuracy"] == np.mean(right)
    assert found["accuracy_stderr"] == pytest.approx(np.std(right, ddof=1) / math.sqrt(len(right)))
    assert found["perplexity"] == pytest.approx(math.exp(nats / len(items)), rel=1e-5)


def test_a_context_is_cut_from_the_left_and_leaves_room_for_the_ending(tmp_path):
    """16 inputs: 7 tokens of the context, and all but the last of the ending's 10."""
    path = write(tmp_path / "words.jsonl", [{"text": "0123456789 abcdefghi"}, {"text": "3456789 abcdefghi"}])
    task = Task(path, build_tokenizer("byte"), 16)
    assert [bytes(row.tolist()) for row in task.rows] == [b"3456789 abcdefghi"] * 2
    assert task.n_cut == 1
    inputs, targets = task.read(np.array([0]))
    assert bytes(inputs[0].tolist()) == b"3456789 abcdefgh" and bytes(targets[0, 6:].tolist()) == b" abcdefghi"
    assert (targets[0, :6] == -100).all()


@pytest.mark.parametrize(
    "text, reason",
    [("ab " + "c" * 16, "an ending of 17 tokens; expected at most .*=16"), ("a q", "'q' .*: not among the 4")],
)
def test_an_item_that_the_model_cannot_score_is_refused_with_its_line(text, reason, tmp_path):
    path = write(tmp_path / "words.jsonl", [{"text": "a b"}, {"text": text}])
    with pytest.raises(BadInput, match=f"words.jsonl line 2: {reason}"):
        Task(path, build_tokenizer("char", ["abc "]), 16)
