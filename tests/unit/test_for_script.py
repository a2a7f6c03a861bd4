"""What commands tell the scripts that they start: without starting any."""

from __future__ import annotations

import json

import pytest

import ringtrain
from ringtrain import cli
from ringtrain.errors import ConfigError
from ringtrain.protocol.env import FOR_SCRIPT
from ringtrain.protocol.for_script import ForScript


def test_a_trial_is_empty_outside_of_a_sweep_and_read_only_within_one(monkeypatch):
    assert dict(ringtrain.trial()) == {}
    variables = ForScript(by="ringtrain sweep", trial={"units": 8, "name": "a"}).variables()
    monkeypatch.setenv(FOR_SCRIPT, variables[FOR_SCRIPT])
    values = ringtrain.trial()
    assert dict(values) == {"units": 8, "name": "a"}
    with pytest.raises(TypeError):
        values["units"] = 9


@pytest.mark.parametrize("text", ["[1]", "{", '{"unknown": 1}', '"text"'])
def test_a_variable_that_no_command_has_set_is_named(text):
    with pytest.raises(ConfigError, match=f"{FOR_SCRIPT}: got "):
        ForScript.from_environment({FOR_SCRIPT: text})


def test_a_file_of_settings_has_the_variables_of_later_launches(tmp_path, capsys):
    path = tmp_path / "tuned.json"
    written = ForScript(by="ringtrain sweep", options={"hvd.groups": 2})
    written.write(path, measured=[[1.5]])
    assert json.loads(path.read_text())["measured"] == [[1.5]]
    read = ForScript.read(path)
    assert read == written
    assert ForScript.from_environment(read.variables()) == written

    launch = ["launch", "-np", "1", "-H", "localhost:1", "--dry-run", "--tuned"]
    assert cli.main([*launch, str(path), "python", "own.py"]) == 0
    assert FOR_SCRIPT in capsys.readouterr().out
    path.write_text("[launch]")
    assert cli.main([*launch, str(path), "python", "own.py"]) == 2
    assert "expected the file best.json that ringtrain sweep has written" in capsys.readouterr().err
