"""Runs a script in this process as `python` would."""

from __future__ import annotations

import io
import os
import re
import runpy
import sys
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path

ALONE, WITH_VALUE = re.compile("-[uOBEsPIqvbd]+"), ("-W", "-X")
"""options of Python that may be before a script"""

STANDARD_INPUT = ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
SHELLS = ("sh", "bash", "dash", "zsh")


def reads_its_program(words: Sequence[str]) -> bool:
    """Returns whether a command is Python or a shell that would read its program from standard input."""
    if not (is_python(words) or Path(words[0]).name in SHELLS):
        return False
    rest = iter(words[1:])
    for word in rest:
        if word in STANDARD_INPUT:
            return True
        if not re.fullmatch("-[a-zA-Z]+", word) or re.search("[cmhV]", word):
            return False  # a script, or what has a program, or needs none: -c, -m, --version
        if word in WITH_VALUE:
            next(rest, None)
    return True


def is_python(words: Sequence[str]) -> bool:
    """Returns whether a command line is one of Python."""
    return len(words) > 0 and Path(words[0]).name.startswith("python")


def place_of_script(words: Sequence[str]) -> int:
    """Index of the script, or of -m, in a command line of Python; raises ValueError if there is none."""
    index = 1
    while index < len(words) and is_python(words):
        word = words[index]
        if word == "-m" or not word.startswith("-"):
            return index
        if word in WITH_VALUE:
            index += 1
        elif not ALONE.fullmatch(word) and word[:2] not in WITH_VALUE:
            break
        index += 1
    raise ValueError(f"got {words[0]}, expected python and a script")


def search_as(words: Sequence[str]) -> None:
    """Lets imports search first where they do in a script, or -m and a module, that Python runs."""
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if words[0] == "-m" else str(Path(words[0]).resolve().parent)


def run(words: Sequence[str]) -> None:
    """Runs a script, or -m and a module, with its arguments, as `__main__`."""
    program, *arguments = words
    search_as(words)
    if program == "-m":
        sys.argv[:] = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = words
    is_text = Path(program).is_file() and Path(program).suffix != ".pyc" and not zipfile.is_zipfile(program)
    if not is_text:  # a folder or archive with __main__.py
        runpy.run_path(program, run_name="__main__")
        return
    main = types.ModuleType("__main__")
    main.__file__ = str(Path(program).absolute())
    sys.modules["__main__"] = main
    with io.open_code(main.__file__) as file:
        code = compile(file.read(), main.__file__, "exec", dont_inherit=True)
    exec(code, main.__dict__)
