"""A file of results is continued under the conditions it was measured under, and refused in one line otherwise."""

import pytest

from lab.results import resume, write
from nanoladder.errors import BadInput

CONDITIONS = {"config": ["x.py"], "memory_gb": None}
NEW = {"rows": {}, "spent": 0.0}
RESULTS = {**CONDITIONS, "rows": {"a": 1}, "spent": 0.5}


def test_what_was_written_is_resumed_and_no_file_is_none(tmp_path):
    folder = tmp_path / "new" / "folder"
    new = resume(folder / "x.json", CONDITIONS, NEW)
    assert new == CONDITIONS | NEW | {"commit": new["commit"]}
    write(folder, {"x.json": RESULTS, "x.md": "text"})
    assert resume(folder / "x.json", CONDITIONS, NEW) == RESULTS
    assert (folder / "x.md").read_text() == "text\n"


def test_other_conditions_are_named_and_so_is_one_that_is_missing(tmp_path):
    missing = {key: value for key, value in RESULTS.items() if key != "memory_gb"}
    write(tmp_path, {"x.json": missing})
    with pytest.raises(BadInput, match="measured under another config and memory_gb; choose another --out_dir, or"):
        resume(tmp_path / "x.json", CONDITIONS | {"config": ["y.py"]}, NEW)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b"\xff\xfe\xff", b'{"rows": [], "spent": 0.5}'],
)
def test_a_damaged_file_is_one_line(content, tmp_path):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(
        BadInput, match=r"x.json is not a results file of profile.py \(.+\); expected one, or remove it"
    ):
        resume(tmp_path / "x.json", {}, NEW)
