"""What code this is."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import keras
import pytest

from ringtrain.config import Config
from ringtrain.data import FitArguments
from ringtrain.errors import ConfigError
from ringtrain.run import consistency
from ringtrain.sources.script import ScriptSource

CODE = {"version of keras": "3.14.0", "ringtrain/train.py": "1f", "module my_data": "2e"}


@pytest.mark.parametrize("name", [*CODE, "version of jax"])
def test_a_rank_with_other_code_or_libraries_is_named(name: str) -> None:
    consistency.refuse([("host1", CODE), ("host2", CODE)])
    with pytest.raises(ConfigError, match=f"^rank 1 on host2 has another {name} than rank 0 on host1: 9, not "):
        consistency.refuse([("host1", CODE), ("host2", CODE | {name: "9"})])


def test_git_revision_of_branch_packed_branch_and_detached_head(tmp_path):
    inner = tmp_path / "code" / "inner"
    inner.mkdir(parents=True)
    git = tmp_path / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert consistency.git_revision(inner) is None  # before the first commit
    (git / "packed-refs").write_text(
        f"# pack-refs with: peeled\n{'1' * 40} refs/heads/other\n{'2' * 40} refs/heads/main\n"
    )
    assert consistency.git_revision(inner) == "2" * 40
    (git / "refs" / "heads" / "main").write_text(f"{'3' * 40}\n")
    assert consistency.git_revision(inner) == "3" * 40
    (git / "HEAD").write_text(f"{'4' * 40}\n")
    assert consistency.git_revision(inner) == "4" * 40


def test_git_revision_of_a_further_work_tree_inside_the_first(tmp_path):
    git, further = tmp_path / ".git", tmp_path / "further"
    of_further = git / "worktrees" / "further"
    of_further.mkdir(parents=True)
    further.mkdir()
    (further / ".git").write_text(f"gitdir: {of_further}\n")
    (of_further / "commondir").write_text("../..\n")
    (of_further / "HEAD").write_text("ref: refs/heads/other\n")
    (git / "HEAD").write_text(f"{'1' * 40}\n")
    (git / "packed-refs").write_text(f"{'2' * 40} refs/heads/other\n")
    assert consistency.git_revision(further) == "2" * 40
    assert consistency.git_revision(tmp_path) == "1" * 40
    (further / ".git").write_text("gitdir: ../.git/worktrees/further\n")
    assert consistency.git_revision(further) == "2" * 40


def test_a_script_without_a_file_has_no_checksum(monkeypatch, tmp_path: Path) -> None:
    """`python - <own.py` gives it the name <stdin>."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    of_script = ScriptSource(Config(), keras.Sequential(), FitArguments())
    assert of_script.code() == {}
    main.__file__ = "<stdin>"
    assert of_script.code() == {}
    main.__file__ = str(tmp_path / "own.py")
    Path(main.__file__).write_text("pass")
    assert [*of_script.code()] == ["script"]
