"""Horovod for Keras 3, under Horovod's own names: `import ringtrain.hvd as hvd` in place of `horovod.tensorflow.keras`.

Parts of Horovod 0.28.1 that work under Keras 3 are re-exported: collectives, process sets, timeline, queries. ringtrain
replaces the others and adds checks, `broadcast_model` and `gather_bytes`. Training also works without Horovod: see
`backend.py`.

backend:          source of Horovod's names (Horovod or mpi4py), and Horovod's settings
mpi_backend:      the part of Horovod's API that training needs, in mpi4py and NumPy
process:          state of the process between init and shutdown
collectives:      init, shutdown, and Horovod's collectives for Keras variables
optimizer:        distributed optimizers and gradient tapes, load_model
distributed:      subclass that makes an optimizer reduce its gradients
reduction:        averages gradients over the ranks, for all strategies over Horovod and mpi4py
compression:      compressions of gradients by name
powersgd:         low-rank gradients, in place of an allreduce of each
train_step:       the layers around a model's training step, in one order
keras_patches:    patches of private Keras API (loss scale, XLA), and a check for Horovod's own wrapper
callbacks:        broadcast, metric average, learning rate, best model, sync check
batch_norm:       batch normalization over all ranks; averaged moving statistics
step_timing:      current phase and timestamps of a step, readable from other threads
sync:             broadcast of a model's whole state; verification that ranks agree
together:         actions whose error on one rank is raised on all of them
verify_averaging: verification that an update receives the ranks' gradients combined
placement:        check that ranks run where the launcher planned them, each on its own GPU
elastic:          Keras state of elastic runs, and `run`
model_parallel:   a model over several devices of a rank
"""

from ringtrain.errors import MissingDependency
from ringtrain.hvd.process import check_keras, uncollected
from ringtrain.protocol.env import install

try:
    with uncollected():
        from ringtrain.hvd import backend  # first: it looks at Horovod before TensorFlow is loaded
    with uncollected():
        import keras
    check_keras(keras.__version__)
except MissingDependency:
    raise
except Exception as error:  # libraries that do not fit each other fail by errors of any type
    raise MissingDependency(
        f"ringtrain.hvd needs TensorFlow and Horovod built for it ({error}): {install()}"
    ) from error

if keras.backend.backend() != "tensorflow":
    raise MissingDependency(
        f"Keras runs on {keras.backend.backend()!r}, but Horovod is built for TensorFlow: set KERAS_BACKEND=tensorflow"
    )

from ringtrain.hvd import callbacks, elastic, step_timing
from ringtrain.hvd.backend import (
    Adasum,
    Average,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    broadcast_global_variables,
    ccl_built,
    check_num_rank_power_of_2,
    configure,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    gpu_available,
    grouped_allgather,
    grouped_reducescatter,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank_op,
    remove_process_set,
    rocm_built,
    size_op,
    start_timeline,
    stop_timeline,
)
from ringtrain.hvd.batch_norm import (
    SyncBatchNormalization,
    average_moving_statistics,
    batch_norm_layers,
    global_seed,
    is_shared,
    layers_own_variables,
    moving_statistics,
    seed_globally_by_rank,
    seeds,
    share_state,
    synchronize_batch_norm,
    synchronized_layers,
    unsynchronize,
    weights_of_one_rank,
)
from ringtrain.hvd.collectives import (
    allgather,
    allgather_object,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
    copies_of,
    gather_bytes,
    grouped_allreduce,
    init,
    num_copies,
    rank,
    reducescatter,
    scatter_bytes,
    shutdown,
    size,
)
from ringtrain.hvd.compression import Compression
from ringtrain.hvd.distributed import (
    average_accumulated,
    variables_of_one_rank,
    weigh_gradients,
)
from ringtrain.hvd.keras_patches import jit_gradients, optimizers_of, ranks_reduce
from ringtrain.hvd.model_parallel.columns import Whole, columns_of, refuse_optimizer, whole_variables
from ringtrain.hvd.model_parallel.stages import split
from ringtrain.hvd.optimizer import (
    DistributedGradientTape,
    DistributedOptimizer,
    PartialDistributedGradientTape,
    PartialDistributedOptimizer,
    load_model,
)
from ringtrain.hvd.placement import check_placement
from ringtrain.hvd.step_timing import during
from ringtrain.hvd.sync import broadcast_model, check_in_sync
from ringtrain.hvd.together import barrier, on_rank_0, run_together
from ringtrain.hvd.verify_averaging import check_averaging
