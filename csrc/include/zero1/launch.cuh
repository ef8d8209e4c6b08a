// Launching a kernel. No <<<>>>, so that the kernels' sources are plain C++ to a compiler that is given the runtime.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace zero1 {

constexpr int kThreads = 256;

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

// Runs a grid-stride kernel over work that fills `blocks` blocks, with no more of them than the device holds at once.
// No work, no launch: a grid of no blocks would be an error.
template <auto kernel, class Args>
cudaError_t launch(int64_t blocks, const Args& args, cudaStream_t stream) {
  if (blocks <= 0) return cudaSuccess;
  int64_t resident = 0;
  cudaError_t status = resident_blocks<kernel>(&resident);
  if (status == cudaSuccess) {
    const dim3 grid(static_cast<unsigned>(std::min(blocks, resident))), threads(kThreads);
    void* pointers[] = {const_cast<Args*>(&args)};
    status = cudaLaunchKernel(kernel, grid, threads, pointers, 0, stream);
  }
  if (status != cudaSuccess) (void)cudaGetLastError();  // reported here: nobody should come upon it later
  return status;
}

}  // namespace zero1
