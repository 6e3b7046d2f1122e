"""Folders of models in Hugging Face's format, local ones or from the hub."""

from pathlib import Path

from nanoladder.errors import BadInput

HUB = "hf:"  # before the name of such a model, or its folder


def find_folder(name: str, patterns: list[str]) -> Path:
    """Returns a model's folder: a local one, or a snapshot from the hub, downloaded unless cached.

    name: a folder, gpt2, gpt2-medium, gpt2-large, gpt2-xl or the hub's owner/name. patterns: the files to download.
    Raises BadInput.
    """
    if name and Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # a download fails in many ways
        raise BadInput(
            f"hf:{name}: no such folder, and no model could be downloaded ({type(error).__name__}), which needs the "
            f"network and the package huggingface_hub; expected a model of https://huggingface.co, such as hf:gpt2, or "
            f"hf:FOLDER, with its {', '.join(patterns)}"
        ) from None
