"""Tokenizers in Hugging Face's format."""

from nanoladder.errors import BadInput


def from_huggingface(folder):
    """Returns the tokenizer in a folder, as a tiktoken.Encoding."""
    raise BadInput(f"tokenizer in {folder}: not read yet")
