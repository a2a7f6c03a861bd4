"""What training does not need is loaded when it is used."""

from __future__ import annotations

import sys

import pytest
from launching import run

pytestmark = pytest.mark.launch

LEAN = """
import sys
from ringtrain.models import lazy_keras
lazy_keras.start()
import inspect, tensorflow, keras
inspect.getmodule(lazy_keras.start)  # walks through all modules
print("sklearn" in sys.modules, "matplotlib" in sys.modules)
print(keras.wrappers.SKLearnClassifier.__name__, keras.visualization.plot_image_gallery.__name__)
print("sklearn" in sys.modules, "matplotlib" in sys.modules)
"""


def test_what_training_does_not_need_is_loaded_when_it_is_used():
    ended = run(0, [sys.executable, "-c", LEAN], 120)
    before, used, after = ended.stdout.splitlines()
    assert (before, used, after) == ("False False", "SKLearnClassifier plot_image_gallery", "True True"), ended.stderr
