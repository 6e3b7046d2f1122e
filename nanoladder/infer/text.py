"""A text as it grows: its tokens, and its characters once they are certain."""

import codecs

import torch
from tiktoken import Encoding

from nanoladder.infer.healing import Prompt
from nanoladder.tokenizer.encoding import end_of_text


class Text:
    """The tokens of a prompt and its continuation, up to max_new_tokens, <|endoftext|> or the stop text.

    prompt: a Prompt. generator: the torch.Generator, on the model's device, that samples its tokens.
    """

    def __init__(
        self, tokenizer: Encoding, prompt: Prompt, generator: torch.Generator, max_new_tokens: int, stop: str = ""
    ) -> None:
        self.tokenizer, self.n_vocab, self.end = tokenizer, tokenizer.n_vocab, end_of_text(tokenizer)
        self.prompt, self.tokens, self.max_tokens = prompt, list(prompt.tokens), len(prompt.tokens) + max_new_tokens
        self.generator, self.stop = generator, stop
        self.ended = False
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # a character may span several tokens
        self.characters = ""  # not yet returned by take()

    def add(self, token):
        """Appends a token id, or ends the text. n_vocab + i: the prompt's i-th crossing token, after its Split's.

        Returns True if it was one: the prompt's tokens have been replaced.
        """
        n_bytes = 0  # of the token, already in the prompt
        if crosses := token >= self.n_vocab:
            split, token = self.prompt.crossing(token - self.n_vocab)
            self.max_tokens += len(split.tokens) - len(self.tokens)
            self.tokens, n_bytes = list(split.tokens), split.n_bytes
        if token == self.end:
            self.ended = True
        else:
            self.tokens.append(token)
            self.characters += self.utf8.decode(self.tokenizer.decode_single_token_bytes(token)[n_bytes:])
            self.ended = len(self.tokens) == self.max_tokens
        if self.ended:
            self.characters += self.utf8.decode(b"", final=True)
        if self.stop and self.stop in self.characters:
            self.characters, self.ended = self.characters.partition(self.stop)[0], True
        return crosses

    def take(self) -> str:
        """Returns the characters since the last call, except a tail that may begin the stop text."""
        sizes = range(min(len(self.stop) - 1, len(self.characters)), 0, -1) if not self.ended else []
        n_held = next((size for size in sizes if self.characters.endswith(self.stop[:size])), 0)
        n_ready = len(self.characters) - n_held
        ready, self.characters = self.characters[:n_ready], self.characters[n_ready:]
        return ready
