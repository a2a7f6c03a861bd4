"""Which callbacks may end training within an epoch. With one of them, the ranks agree after each step: about 1 ms."""

from __future__ import annotations

import functools
import inspect
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras

HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
ATTRIBUTE = b"stop_training"
"""what a callback sets to end training"""
OF_OTHERS = ("keras", "ringtrain", "builtins")
"""packages whose classes a callback derives from, and which know the attribute"""
INSTALLED = tuple(
    Path(folder).resolve()
    for folder in (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), site.getusersitepackages())
)


def may_stop(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback runs code of a script at batches which may set `stop_training`.

    That code is what files name the attribute: those of the hooks, of the packages of its classes, and of all modules
    that are not installed. A file that cannot be read, as in a notebook, counts as one that does.
    """
    hooks = list(_hooks_of_scripts(callback))
    if not hooks:
        return False
    files = {*map(_file_of, hooks), *_files_of_classes(callback), *_files_of_scripts()}
    return any(map(_names_the_attribute, sorted(files)))


def _hooks_of_scripts(callback: keras.callbacks.Callback) -> Iterator[Any]:
    """Functions of a callback that are called at batches, without those of Keras and ringtrain."""
    for hook in HOOKS:
        if hook in vars(callback):  # of a LambdaCallback
            yield vars(callback)[hook]
            continue
        definer = next(kind for kind in type(callback).__mro__ if hook in vars(kind))
        if _package_of(definer) not in OF_OTHERS:
            yield vars(definer)[hook]


def _package_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _file_of(function: Any) -> str:
    """File with the code of a function; "" if it is not known."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return getattr(code, "co_filename", "")


def _files_of_classes(callback: keras.callbacks.Callback) -> Iterator[str]:
    """Files of the packages that define the classes of a callback: a hook may call what stands in another module."""
    packages = {_package_of(kind) for kind in type(callback).__mro__} - {*OF_OTHERS}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages and getattr(module, "__file__", None):
            yield str(module.__file__)


def _files_of_scripts() -> Iterator[str]:
    """Files of the loaded modules that are not installed."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or name.partition(".")[0] in (*OF_OTHERS, "tensorflow", "horovod"):
            continue
        path = Path(file).resolve()
        if not any(path.is_relative_to(folder) for folder in INSTALLED):
            yield str(path)


@functools.cache
def _names_the_attribute(file: str) -> bool:
    try:
        return ATTRIBUTE in Path(file).read_bytes()
    except OSError:
        return True
