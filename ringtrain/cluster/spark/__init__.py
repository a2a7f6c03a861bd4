"""Spark: a function run once per combination of its arguments (`launch`), and executors as places for ranks."""

from ringtrain.cluster.spark.session import start
from ringtrain.cluster.spark.trials import Row, launch

__all__ = ["Row", "launch", "start"]
