"""Lines of a script that may keep a claim of `ringtrain prove` from holding: its own code, read but not run."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras

    from ringtrain.data import FitArguments

PACKAGE = Path(__file__).parents[2]
INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))
CLOCKS = (
    "time.time",
    "time.time_ns",
    "time.monotonic",
    "time.perf_counter",
    "datetime.datetime.now",
    "datetime.datetime.utcnow",
    "datetime.now",
    "tensorflow.timestamp",
)
SEEDED = ("seed", "set_seed", "get_state", "set_state", "getstate", "setstate", "Generator", "SeedSequence")
"""functions of NumPy's, Python's and TensorFlow's random modules that draw nothing"""
OTHERS_THAT_DRAW = ("secrets.", "keras.backend.random_", "tensorflow.keras.backend.random_")
"""beginnings of functions of other modules that draw numbers without a seed"""
GENERATORS = ("default_rng", "RandomState", "Random")
"""they draw the same numbers in every process if they are given a seed"""
WRITES = ("assign", "assign_add", "assign_sub", "set_weights", "load_weights")
MAX_NAMED = 3


@dataclass(frozen=True)
class Suspect:
    """A line of the script."""

    kind: str
    """"order": a dataset is shuffled without a seed; "random": numbers are drawn from no seed of Keras; "clock": a
    clock is read; "writes": variables are changed; "is": where the role is defined"""
    role: str
    """what of the job the line belongs to: callback, metric, loss, layer, model, data, script"""
    name: str
    """of that, such as that of a metric"""
    where: str
    """file:line"""
    text: str


@dataclass(frozen=True)
class _Part:
    """Code of a part of the job: a class or a function."""

    role: str
    name: str
    file: Path
    begin: int
    end: int


def named(suspects: Sequence[Suspect], *kinds: str, roles: Sequence[str] = (), name: str = "") -> str:
    """A phrase that names the suspects of some kinds, as "; likely own.py:12 ..."; "" if there are none.

    If some belong to a part of the job, the rest of the script is not named.
    """
    found = []
    for kind in kinds:
        for one in suspects:
            if one.kind == kind and (not roles or one.role in roles) and (not name or one.name == name):
                found.append(one)
    nearer = [one for one in found if one.role != "script"]
    texts = []
    for one in nearer or found:
        belongs_to = "" if one.role == "script" else f" in {one.role} {one.name}"
        texts.append(f"{one.where}: {one.text}{belongs_to}")
    texts = list(dict.fromkeys(texts))
    return f"; likely {'; '.join(texts[:MAX_NAMED])}" if texts else ""


def of_script(model: keras.Model, arguments: FitArguments) -> list[Suspect]:
    """Suspicious lines of the code that a call of `fit` runs and of the script around it."""
    parts = list(_parts(model, arguments))
    files = {part.file for part in parts} | _own_files()
    found = [Suspect("is", one.role, one.name, f"{_short(one.file)}:{one.begin}", "is defined here") for one in parts]
    for file in sorted(files):
        for kind, line, text, is_in_class in _lines(file):
            inside = [one for one in parts if one.file == file and one.begin <= line <= one.end]
            if not inside and is_in_class:
                continue  # a class that this job does not use
            innermost = min(inside, key=lambda one: one.end - one.begin, default=None)
            role, name = "script", ""
            if innermost:
                role, name = innermost.role, innermost.name
            found.append(Suspect(kind, role, name, f"{_short(file)}:{line}", text))
    return found


def _own_files() -> set[Path]:
    """Files of the script and of the modules beside it."""
    found = set()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and _is_own(Path(file).resolve()):
            found.add(Path(file).resolve())
    return found


def _is_own(file: Path) -> bool:
    return not file.is_relative_to(PACKAGE) and not any(file.is_relative_to(folder) for folder in INSTALLED)


def _short(file: Path) -> str:
    if file.is_relative_to(Path.cwd()):
        return str(file.relative_to(Path.cwd()))
    return str(file)


def _parts(model: Any, arguments: FitArguments) -> Iterator[_Part]:
    """Code of the script that a call of `fit` runs."""
    import keras

    from ringtrain import hvd
    from ringtrain.hvd.keras_patches import layers_of

    for callback in arguments.callbacks:
        yield from _of_object("callback", type(callback).__name__, callback)
        if isinstance(callback, keras.callbacks.LambdaCallback):
            for function in vars(callback).values():
                yield from _of_code("callback", "LambdaCallback", function)
    yield from _of_object("model", type(model).__name__, model)
    yield from _of_code("model", "train_step", vars(model).get("train_step"))
    for layer in layers_of(model):
        yield from _of_object("layer", layer.name, layer)
    metrics = list(model.metrics)
    compiled = getattr(model, "_compile_metrics", None)
    for given in keras.tree.flatten(compiled._user_metrics) if compiled else ():
        yield from _of_object("metric", getattr(given, "name", getattr(given, "__name__", "")), given)
        yield from _of_code("metric", getattr(given, "__name__", ""), given)
    for metric in metrics:
        yield from _of_object("metric", metric.name, metric)
    for loss in keras.tree.flatten(getattr(model, "loss", None)):
        yield from _of_object("loss", getattr(loss, "name", ""), loss)
        yield from _of_code("loss", getattr(loss, "__name__", ""), loss)
    for optimizer in hvd.optimizers_of(model):
        yield from _of_object("optimizer", type(optimizer).__name__, optimizer)
    x = arguments.x
    yield from _of_code("data", getattr(x, "__name__", ""), getattr(x, "gi_code", x))
    yield from _of_object("data", type(x).__name__, x)


def _of_object(role: str, name: str, one: Any) -> Iterator[_Part]:
    """The script's classes of an object."""
    for kind in type(one).__mro__:
        yield from _of_code(role, name, kind)


def _of_code(role: str, name: str, code: Any) -> Iterator[_Part]:
    """A class, function or code object, if it is the script's."""
    if not (inspect.isclass(code) or inspect.isroutine(code) or inspect.iscode(code)):
        return
    with contextlib.suppress(OSError, TypeError):
        file = Path(inspect.getsourcefile(code) or "").resolve()
        if _is_own(file):
            lines, begin = inspect.getsourcelines(code)
            yield _Part(role, name, file, begin, begin + len(lines) - 1)


def _lines(file: Path) -> list[tuple[str, int, str, bool]]:
    """Kind, line and text of the suspicious calls of a file, and whether each is in a class."""
    try:
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError):
        return []
    aliases = _aliases(tree)
    texts, found = source.splitlines(), []
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            kind = _kind_of(node, aliases)
            if kind:
                line = node.func.end_lineno or node.lineno  # of a chain of calls, that with the name
                is_in_class = any(one.lineno <= line <= (one.end_lineno or 0) for one in classes)
                found.append((kind, line, texts[line - 1].strip()[:80], is_in_class))
    return sorted(set(found), key=lambda one: one[1])


def _aliases(tree: ast.AST) -> dict[str, str]:
    """Full names of what a file imports, by the name that it has there."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                found[one.asname or one.name.partition(".")[0]] = one.name if one.asname else one.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for one in node.names:
                found[one.asname or one.name] = f"{node.module}.{one.name}"
    return found


def _kind_of(call: ast.Call, aliases: dict[str, str]) -> str:
    """Kind of a suspicious call; "" for others."""
    base, _, function = ast.unparse(call.func).rpartition(".")
    root, dot, rest = (base or function).partition(".")
    full = aliases.get(root, root) + dot + rest
    if base:
        full = f"{full}.{function}"
    has_seed = any(keyword.arg == "seed" for keyword in call.keywords)
    if full in CLOCKS:
        return "clock"
    for check in (_draws, _shuffles, _writes):
        kind = check(full, function, call, has_seed)
        if kind:
            return kind
    return ""


def _draws(full: str, function: str, call: ast.Call, has_seed: bool) -> str:
    """Kind of a call of a random module."""
    module = re.match(r"(numpy\.random|random|tensorflow\.random|tensorflow\.compat\.v1\.random)\.(\w+)$", full)
    if module is None or function in SEEDED or has_seed or function.startswith("stateless_"):
        if full in ("os.urandom", "uuid.uuid4") or full.startswith(OTHERS_THAT_DRAW):
            return "random"
        return ""
    if function in GENERATORS and (call.args or call.keywords):
        return ""
    return "random"


def _shuffles(full: str, function: str, call: ast.Call, has_seed: bool) -> str:
    """Kind of a shuffle of a dataset; arrays are shuffled by a generator of NumPy."""
    is_of_numpy = re.search(r"(random|rng|generator|\brs)\.shuffle$", full, re.IGNORECASE)
    if function == "shuffle" and "." in full and not is_of_numpy and len(call.args) < 2 and not has_seed:
        return "order"
    return ""


def _writes(full: str, function: str, call: ast.Call, has_seed: bool) -> str:
    """Kind of a call that changes variables."""
    return "writes" if function in WRITES and "." in full else ""
