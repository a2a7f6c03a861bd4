"""Data by name, module:function or as arguments of Keras' fit, and the rows of each rank as tf.data pipelines.

dataset:        training and test data of a run
sources:        data by name: digits, images, synthetic, npz
classes:        arrays with an integer class for each row
spark_rows:     rows that Spark streams to this rank
arrays:         arrays as Keras' fit takes them, and a rank's rows of each global batch
records:        rows of files that are read while they are trained
record_files:   such files of any kind, and images in a folder per class
parquet_files:  Parquet
tfrecord_files: TFRecords of any features
blocks:         what is read of a file at once, ahead, and kept in memory
data_files:     files behind paths and URLs
python_calls:   functions that threads of tf.data call, also while the process ends
parts:          a rank's parts of a batch, and the header of its rows
streams:        batches of a tf.data.Dataset, PyDataset or generator, and a rank's rows of each
from_rank_0:    batches that rank 0 sends to the other ranks
fit_arguments:  arguments of Keras' fit
inputs:         training and validation data from them
row_order:      order of rows, and those of a rank
augment:        decoding, crops and flips, determined by seed, epoch and row
division:       copies of tf.data pipelines, what their parts are, and the same for the rows of one rank alone
"""

from __future__ import annotations

from ringtrain.data.arrays import Arrays, NoSamples, NumberedRows, RowBatches
from ringtrain.data.dataset import DataSet, Split, evaluation_batches
from ringtrain.data.fit_arguments import BATCH_SIZE, FitArguments, with_batch_sizes
from ringtrain.data.inputs import for_all_ranks, inputs, shapes_of, to_evaluate
from ringtrain.data.parts import Header, Parts
from ringtrain.data.python_calls import text_of_data_error
from ringtrain.data.row_order import evaluation_shard, part_of
from ringtrain.data.sources import source
from ringtrain.data.streams import Stream
