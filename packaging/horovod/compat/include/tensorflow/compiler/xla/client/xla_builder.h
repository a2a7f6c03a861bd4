// Horovod 0.28.1 (horovod/tensorflow/xla_mpi_ops.cc) includes XLA's builder under a path that TensorFlow no longer has.
// This stands in for it there and includes it from where it lies today, so that Horovod's release builds as it is.
//
// XLA also gave up its own name for absl::StatusOr. On CPU Horovod's code for XLA is left out by the preprocessor; a GPU
// build compiles it and needs the name.

#pragma once

#include "absl/status/statusor.h"
#include "xla/hlo/builder/xla_builder.h"

namespace xla {
template <typename T>
using StatusOr = absl::StatusOr<T>;
}
