// Horovod 0.28.1 (horovod/tensorflow/mpi_ops.cc) declares AsGpuStreamValue for itself and takes the CUDA stream of a GPU
// operation from it. TensorFlow no longer exports that function: the library would link, and could not be loaded.
//
// This stands in front of the header of the same name that TensorFlow does have (so its folder has to be searched first,
// by -iquote), includes what that one includes, and in GPU builds defines the function.

#pragma once

#include "xla/stream_executor/stream.h"

#if HAVE_CUDA
#include <cuda_runtime.h>

namespace stream_executor {
namespace gpu {
inline cudaStream_t AsGpuStreamValue(Stream* stream) {
  return static_cast<cudaStream_t>(stream->platform_specific_handle().stream);
}
}  // namespace gpu
}  // namespace stream_executor
#endif
