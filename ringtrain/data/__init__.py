"""Data by name, module:function or as arguments of Keras' fit, and the rows of each rank as tf.data pipelines.

dataset:        training and test data of a run
sources:        data by name, which are found without TensorFlow
datasets:       digits, images, synthetic, npz, ...
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

from typing import TYPE_CHECKING

from ringtrain.protocol import lazy

MODULES = {
    **dict.fromkeys(["Arrays", "NoSamples", "NumberedRows", "RowBatches"], "arrays"),
    **dict.fromkeys(["DataSet", "Split", "evaluation_batches"], "dataset"),
    **dict.fromkeys(["BATCH_SIZE", "FitArguments", "with_batch_sizes"], "fit_arguments"),
    **dict.fromkeys(["for_all_ranks", "shapes_of", "splits_of", "to_evaluate"], "inputs"),
    **dict.fromkeys(["Header", "Parts"], "parts"),
    **dict.fromkeys(["text_of_data_error"], "python_calls"),
    **dict.fromkeys(["evaluation_shard", "part_of"], "row_order"),
    **dict.fromkeys(["source"], "sources"),
    **dict.fromkeys(["Stream"], "streams"),
}
"""names of this folder, by the module that is imported when one is used; `source` needs no TensorFlow"""

if TYPE_CHECKING:  # for editors and mypy
    from ringtrain.data.arrays import Arrays as Arrays
    from ringtrain.data.arrays import NoSamples as NoSamples
    from ringtrain.data.arrays import NumberedRows as NumberedRows
    from ringtrain.data.arrays import RowBatches as RowBatches
    from ringtrain.data.dataset import DataSet as DataSet
    from ringtrain.data.dataset import Split as Split
    from ringtrain.data.dataset import evaluation_batches as evaluation_batches
    from ringtrain.data.fit_arguments import BATCH_SIZE as BATCH_SIZE
    from ringtrain.data.fit_arguments import FitArguments as FitArguments
    from ringtrain.data.fit_arguments import with_batch_sizes as with_batch_sizes
    from ringtrain.data.inputs import for_all_ranks as for_all_ranks
    from ringtrain.data.inputs import shapes_of as shapes_of
    from ringtrain.data.inputs import splits_of as splits_of
    from ringtrain.data.inputs import to_evaluate as to_evaluate
    from ringtrain.data.parts import Header as Header
    from ringtrain.data.parts import Parts as Parts
    from ringtrain.data.python_calls import text_of_data_error as text_of_data_error
    from ringtrain.data.row_order import evaluation_shard as evaluation_shard
    from ringtrain.data.row_order import part_of as part_of
    from ringtrain.data.sources import source as source
    from ringtrain.data.streams import Stream as Stream
else:
    __getattr__, __dir__ = lazy.names_of(__name__, MODULES)
