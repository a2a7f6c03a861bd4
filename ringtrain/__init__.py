"""Data-parallel training of Keras 3 models with Horovod.

``ringtrain.train`` is the training job, ``ringtrain.hvd`` is Horovod under its own names as Keras 3 needs it. This
module imports neither Horovod nor TensorFlow.
"""

__version__ = "0.1.0"
