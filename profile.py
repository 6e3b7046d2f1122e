"""Measures the gain of each ladder stage on this machine: python profile.py config/x.py [--mode=MODE] ..."""

import importlib.util
import sys
import sysconfig
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # omitted by python -P

    from lab.measure.modes import main
    from nanoladder.entry import run_script

    run_script(main)
elif __name__ == "profile":  # torch imports cProfile, which imports the standard library's module of this name
    spec = importlib.util.spec_from_file_location("profile", Path(sysconfig.get_path("stdlib")) / "profile.py")
    sys.modules["profile"] = importlib.util.module_from_spec(spec)  # pyright: ignore
    spec.loader.exec_module(sys.modules["profile"])
