"""Generation: a KV cache, token sampling, and texts as they grow.

cache.py runs a model one token at a time, generate.py samples the tokens, healing.py finds tokens that cross a prompt's
end, text.py turns tokens into characters, linear.py has matrix products for a single row, int8.py has one-byte weights.
They replace parts of a model from outside, without any code in model.py. Not here: the command line (sample.py),
reading models (nanoladder/checkpoint).
"""

from nanoladder.infer.cache import CachedGPT
from nanoladder.infer.generate import USUAL, Sampling, generate
from nanoladder.infer.healing import Prompt, heal
from nanoladder.infer.int8 import quantize, require_gain
from nanoladder.infer.text import Text
