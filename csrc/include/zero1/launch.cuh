// Launching a kernel, on a GPU or in the host shim of the tests, which compiles the same sources as C++.
#pragma once

#ifdef ZERO1_HOST_SHIM
#include "host_shim.h"
#else
#include <cuda_runtime.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace zero1 {

constexpr int kThreads = 256;

#ifdef ZERO1_HOST_SHIM

template <auto kernel>
cudaError_t resident_blocks(int64_t* blocks) {
  *blocks = host_shim::resident_blocks();
  return cudaSuccess;
}

template <auto kernel, class Args>
cudaError_t start(int64_t blocks, const Args& args, cudaStream_t) {
  return host_shim::launch(kernel, blocks, kThreads, args);
}

#else

// The blocks of a kernel that the current device can hold at once. Asked once per device: the question is slow next to
// a launch, and the answer never changes.
template <auto kernel>
cudaError_t resident_blocks(int64_t* blocks) {
  constexpr int kKnown = 64;
  static std::atomic<int> known[kKnown];
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  int count = device < kKnown ? known[device].load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    int multiprocessors = 0, per_multiprocessor = 0;
    status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (status != cudaSuccess) return status;
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, kThreads, 0);
    if (status != cudaSuccess) return status;
    count = std::max(1, multiprocessors * per_multiprocessor);
    if (device < kKnown) known[device].store(count, std::memory_order_relaxed);
  }
  *blocks = count;
  return cudaSuccess;
}

template <auto kernel, class Args>
cudaError_t start(int64_t blocks, const Args& args, cudaStream_t stream) {
  // clang-format off
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args);
  // clang-format on
  return cudaGetLastError();
}

#endif

// Runs a grid-stride kernel over work that fills `blocks` blocks, with no more of them than the device holds at once.
// No work, no launch: a grid of no blocks would be an error.
template <auto kernel, class Args>
cudaError_t launch(int64_t blocks, const Args& args, cudaStream_t stream) {
  if (blocks <= 0) return cudaSuccess;
  int64_t resident = 0;
  const cudaError_t status = resident_blocks<kernel>(&resident);
  if (status != cudaSuccess) return status;
  return start<kernel>(std::min(blocks, resident), args, stream);
}

}  // namespace zero1
