"""Callbacks with which the ranks agree after each step, as they may end training there."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType

import keras
import pytest

from ringtrain.run import batch_hooks

HOOK = "on_train_batch_end"
COUNTS = """
import keras

class Counts(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.last = batch
"""
STOPS = """
def end(model):
    model.stop_training = True
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes and imports a module of a script; the only one besides the test's own, which names the attribute."""
    tests = Path(__file__).resolve().parent.parent
    for name, other in list(sys.modules.items()):
        if getattr(other, "__file__", None) and tests in Path(str(other.__file__)).resolve().parents:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    batch_hooks._names_the_attribute.cache_clear()

    def write(name: str, text: str) -> ModuleType:
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield write
    for name, written in list(sys.modules.items()):
        if str(getattr(written, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def test_a_hook_that_cannot_stop_needs_no_agreement(module):
    assert not batch_hooks.may_stop(module("counts", COUNTS).Counts())


def test_it_may_stop_if_its_file_names_the_attribute(module):
    assert batch_hooks.may_stop(module("counts_and_stops", COUNTS + STOPS).Counts())


def test_it_may_stop_through_another_module_of_the_script(module):
    counts = module("counts_here", COUNTS).Counts()
    assert not batch_hooks.may_stop(counts)
    module("stops_elsewhere", STOPS)
    assert batch_hooks.may_stop(counts)


def test_it_may_stop_through_a_module_of_its_installed_package(module, tmp_path, monkeypatch):
    package = tmp_path / "tool"
    package.mkdir()
    (package / "__init__.py").write_text(COUNTS)
    (package / "stops.py").write_text(STOPS)
    monkeypatch.setattr(batch_hooks, "INSTALLED", (*batch_hooks.INSTALLED, tmp_path.resolve()))
    tool = importlib.import_module("tool")
    assert not batch_hooks.may_stop(tool.Counts())
    importlib.import_module("tool.stops")
    assert batch_hooks.may_stop(tool.Counts())


@pytest.mark.parametrize("hook", batch_hooks.HOOKS)
def test_code_without_a_file_may_stop(module, hook):
    """Such as that of a notebook."""
    names: dict[str, object] = {}
    exec(compile("def hook(self, batch, logs=None): pass", "<cell>", "exec"), names)
    own = type("Own", (keras.callbacks.Callback,), {hook: names["hook"]})
    assert batch_hooks.may_stop(own())


def test_a_function_whose_code_is_not_known_may_stop(module):
    own = type("Own", (keras.callbacks.Callback,), {HOOK: functools.partial(print)})
    assert batch_hooks.may_stop(own())


def test_functions_of_a_lambda_callback_are_hooks(module):
    made = module("made", "def count(batch, logs):\n    pass\n")
    assert not batch_hooks.may_stop(keras.callbacks.LambdaCallback(on_train_batch_end=made.count))
    stops = module("made_to_stop", STOPS)
    assert batch_hooks.may_stop(keras.callbacks.LambdaCallback(on_train_batch_end=stops.end))


def test_callbacks_of_keras_do_not_stop_within_epochs():
    assert not batch_hooks.may_stop(keras.callbacks.EarlyStopping())
