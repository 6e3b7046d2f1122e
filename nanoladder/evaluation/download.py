"""The public task files: where they come from, where they lie, and downloading them."""

import http.client
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from nanoladder.data.datasets import DATA_DIR
from nanoladder.errors import BadInput, nearest


class Public(NamedTuple):
    """A public file and its SHA-256."""

    url: str
    path: Path
    sha256: str


# The digests are those that Hugging Face's datasets (dataset_infos.json of hellaswag) and EleutherAI's
# lm-evaluation-harness (lambada) recorded when they downloaded the files.
PUBLIC = {
    "hellaswag": Public(  # the validation set, 10,042 items; the test set's labels are not public
        "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl",
        DATA_DIR / "hellaswag" / "hellaswag_val.jsonl",
        "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588",
    ),
    "lambada": Public(  # the test set as OpenAI prepared it for GPT-2, 5,153 items
        "https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl",
        DATA_DIR / "lambada" / "lambada_test.jsonl",
        "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226",
    ),
}


def download(name):
    """Downloads a public task file, whole or not at all. Returns its path.

    Raises BadInput: no such name, no network, another file than expected, a folder that cannot be written.
    """
    public = PUBLIC.get(name)
    if public is None:
        raise BadInput(f"--download={name}: expected {' or '.join(PUBLIC)}{nearest(name, PUBLIC)}")
    try:
        public.path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(public.url, public.path, public.sha256, progress=sys.stderr.isatty())
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise BadInput(f"cannot download {name} ({reason}); save {public.url} as {public.path}") from None
    except RuntimeError:  # the digest
        raise BadInput(
            f"{public.url} is not the file that was published: other contents, or an incomplete download; try again, "
            f"or save a copy as {public.path}, which is then taken as it is"
        ) from None
    return public.path
