"""Spark sessions, with one-line errors. Only functions import pyspark, which is optional."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ringtrain.errors import LaunchError, MissingDependency

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA = "Java 17 or newer (apt-get install default-jre-headless)"
LOCAL = re.compile(r"local(?:\[(\d+|\*)(?:, *\d+)?\])?")
OTHER_PYTHON = re.compile(r"different version:? (\d\S*) than that in driver:? (\d[\d.]*\d)")
NO_PYTHON = re.compile(r'Cannot run program "([^"]+)"')
PYTHON_ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b:? ?.*", re.MULTILINE)
JAVA_ERROR = re.compile(r"(?:\w+\.)+\w*(?:Exception|Error): ([^\n]+)")
MAX_REASON_LETTERS = 400


def check_installed(environ: Mapping[str, str] = os.environ) -> None:
    """Raises MissingDependency if pyspark or Java is not installed; Java is found by JAVA_HOME or PATH."""
    if importlib.util.find_spec("pyspark") is None:
        raise MissingDependency(f"no pyspark in {sys.executable}: pip install 'ringtrain[spark]', and {JAVA}")
    home = environ.get("JAVA_HOME", "")
    if home and not os.access(Path(home, "bin", "java"), os.X_OK):
        raise MissingDependency(f"got JAVA_HOME={home}, which has no bin/java: unset it, or point it to {JAVA}")
    if not home and not shutil.which("java", path=environ.get("PATH", "")):
        raise MissingDependency(f"no java on PATH, which Spark runs on, and no JAVA_HOME: install {JAVA}")


def local_slots(master: str) -> int | None:
    """Number of slots of a master on this machine, e.g. "local[2]"; None for other masters."""
    match = LOCAL.fullmatch(master)
    if not match:
        return None
    if match[1] == "*":
        return len(os.sched_getaffinity(0))
    return int(match[1] or 1)


def start(
    master: str = "", settings: Mapping[str, str] | None = None, defaults: Mapping[str, str] | None = None
) -> SparkSession:
    """Starts Spark, with the driver in this process; executors run this Python, unless PYSPARK_PYTHON names another.

    Args:
        master: e.g. "local[2]" or "spark://host:7077"; "": from spark-defaults.conf, else "local[*]".
        settings: Spark settings by name.
        defaults: Values for settings that neither `settings` nor spark-defaults.conf sets.

    Returns:
        The session; an existing one is reused.

    Raises:
        MissingDependency: pyspark or Java is not installed.
        LaunchError: Spark does not start.
    """
    check_installed()
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    try:
        SparkContext._ensure_initialized()  # starts Java: only Java reads spark-defaults.conf
        conf = SparkConf()
        for name, value in (settings or {}).items():
            conf.set(name, value)
        for name, value in (defaults or {}).items():
            conf.setIfMissing(name, value)
        if master:
            conf.setMaster(master)
        return SparkSession.builder.config(conf=conf).getOrCreate()
    except Exception as error:
        if "JAVA_GATEWAY_EXITED" in str(error):
            raise LaunchError(f"Java exited before Spark started, see above: Spark needs {JAVA}") from error
        raise LaunchError(f"Spark does not start on {master or 'its default master'}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """One-line cause of an error that pyspark raised, extracted from Spark's long message."""
    text = str(error)
    match = OTHER_PYTHON.search(text)
    if match:
        return (
            f"executors run Python {match[1]}, the driver {match[2]}: use the same, by PYSPARK_PYTHON for the"
            f" executors (now {os.environ.get('PYSPARK_PYTHON', 'not set')})"
        )
    if "stopped SparkContext" in text:  # Spark gives up after trying its master for a minute
        return "the master does not answer"
    match = NO_PYTHON.search(text)
    if match:
        return f"a host of the executors cannot start Python as {match[1]}: set PYSPARK_PYTHON to its path on that host"
    remote = text.partition("Traceback (most recent call last)")[2].partition("\n\n")[0]
    lines = PYTHON_ERROR.findall(remote) or JAVA_ERROR.findall(text) or text.split("\n")
    line = lines[-1] if remote else lines[0]
    return " ".join(line.split())[:MAX_REASON_LETTERS] or type(error).__name__
