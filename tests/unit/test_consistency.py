"""What code this is."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import keras
import pytest

from ringtrain.config.sections import Config
from ringtrain.data import FitArguments
from ringtrain.errors import ConfigError
from ringtrain.training import agreement
from ringtrain.training.script import ScriptSource

CODE = {"version of keras": "3.14.0", "ringtrain/train.py": "1f", "module my_data": "2e"}


@pytest.mark.parametrize("name", [*CODE, "version of jax"])
def test_a_rank_with_other_code_or_libraries_is_named(name: str) -> None:
    agreement.refuse([("host1", CODE), ("host2", CODE)])
    with pytest.raises(ConfigError, match=f"^rank 1 on host2 has another {name} than rank 0 on host1: 9, not "):
        agreement.refuse([("host1", CODE), ("host2", CODE | {name: "9"})])


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
