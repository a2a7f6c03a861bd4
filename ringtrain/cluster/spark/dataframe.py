"""Rows of a DataFrame or RDD, distributed over ranks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ringtrain.cluster.spark.session import reason
from ringtrain.errors import DataError, LaunchError

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import SparkSession


def shares(spark: SparkSession, name: str, num_ranks: int) -> tuple[RDD, str]:
    """Distributes rows over the ranks round-robin: lengths differ by at most one; raises LaunchError, DataError."""
    module, _, function = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), function)(spark)
    except (ImportError, AttributeError, ValueError) as error:
        raise LaunchError(f"got --spark-data {name}, expected module:function: {error}") from error
    # Training and test data: a DataFrame with a column "label" (classes from 0) and one column of arrays or several of
    # numbers, or an RDD of (inputs, label) pairs.
    is_pair = isinstance(made, tuple) and len(made) == 2
    if not is_pair or not all(_is_rdd(table) or hasattr(table, "rdd") for table in made):
        raise LaunchError(f"--spark-data {name} returned {type(made).__name__}, expected DataFrames: (training, test)")
    parts, lengths, num_classes = [], [], 0
    for split, data in enumerate(made):
        rdd = data if _is_rdd(data) else data.rdd
        rows = rdd.map(_sample)
        try:
            labels = rows.map(lambda row: row[1]).stats()
            numbered = rows.zipWithIndex()
        except Exception as error:
            raise DataError(f"--spark-data {name}: {reason(error)}") from error
        length = labels.count()
        if length < num_ranks:
            what = ("training", "test")[split]
            raise DataError(f"--spark-data {name}: {length} {what} rows for {num_ranks} ranks, expected one for each")
        lengths.append(length)
        num_classes = max(num_classes, int(labels.max()) + 1)
        parts.append(numbered.map(_numbered_by_rank(split, num_ranks)))
    # Rows (split: 0 training, 1 test; index in the shard; inputs; label) by rank; training rows, test rows, classes.
    shards = parts[0].union(parts[1]).partitionBy(num_ranks, lambda rank: rank).values()
    return shards, f"{lengths[0]} {lengths[1]} {num_classes}"


def _is_rdd(data: Any) -> bool:
    from pyspark import RDD

    return isinstance(data, RDD)


def _numbered_by_rank(split: int, num_ranks: int) -> Any:
    return lambda row: (row[1] % num_ranks, (split, row[1] // num_ranks, *row[0]))


def _sample(row: Any) -> tuple[Any, int]:
    """Converts a row to its inputs, as an array, and its label. Runs on executors."""
    import numpy as np

    if hasattr(row, "asDict"):
        fields = row.asDict()
        if "label" not in fields:
            raise ValueError(f"got columns {', '.join(fields)}, expected one that is called label")
        label = fields.pop("label")
        values = []
        for value in fields.values():
            if hasattr(value, "toArray"):  # a vector of Spark's
                value = value.toArray()
            values.append(value)
        if len(values) == 1:
            (values,) = values
        row = values, label
    inputs = np.asarray(row[0])
    if inputs.dtype == np.float64:
        inputs = inputs.astype(np.float32)
    return inputs, int(row[1])
