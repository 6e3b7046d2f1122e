"""Generation: a KV cache, sampling of tokens, texts as they grow.

cache.py runs a model one token at a time, generate.py samples the tokens, text.py turns them into characters, linear.py
has matrix products for a single row, int8.py weights of one byte. They replace parts of a model from outside: model.py
does not know of it. Not here: the command line (sample.py), reading models (nanoladder/checkpoint).
"""

from nanoladder.infer.cache import CachedGPT
from nanoladder.infer.generate import USUAL, Sampling, generate
from nanoladder.infer.int8 import quantize, require_gain
from nanoladder.infer.text import Text
