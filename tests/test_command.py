"""The command `nanoladder` runs the scripts from any folder, as `python SCRIPT.py` does from the checkout's."""

import subprocess
import sys

import pytest
from conftest import ROOT

from nanoladder import command


def run(words, folder):
    """Runs the command as the installed one does, in a folder."""
    code = "import sys; from nanoladder.command import main; sys.argv[0] = 'nanoladder'; main()"
    line = [sys.executable, "-c", code, *words]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_it_runs_a_script_with_the_presets_of_the_checkout(tmp_path):
    (tmp_path / "mine.py").write_text("batch_size = 7\n")
    result = run(["train", "config/quickstart.py", "mine.py", "--help"], tmp_path)
    assert result.returncode == 0 and "usage: python train.py" in result.stdout
    result = run(["train", "config/quickstart.py", "mine.py", "--n_head=0"], tmp_path)
    assert result.returncode == 2 and "n_head=0" in result.stderr  # both config files were found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "'trian' is unknown, did you mean 'train'?; expected one of train, "),
        (["prepare"], "prepare: expected a dataset, one of fineweb_edu, "),
        (["prepare", "shakespear"], "'shakespear' is unknown, did you mean 'shakespeare'?; expected one of "),
    ],
)
def test_a_wrong_name_is_refused(words, message, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["nanoladder", *words])
    with pytest.raises(SystemExit) as exit:
        command.main()
    assert exit.value.code == 2 and capsys.readouterr().err.startswith(f"error: {message}")


def test_a_config_file_of_this_folder_takes_the_place_of_the_checkouts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command.located("config/gpt2.py") == str(ROOT / "config/gpt2.py")
    (tmp_path / "config").mkdir()
    (tmp_path / "config/gpt2.py").touch()
    assert [command.located(word) for word in ("config/gpt2.py", "config/none.py")] == [
        "config/gpt2.py",
        "config/none.py",
    ]
