// Runs CUDA kernels on the CPU: just enough of CUDA and its runtime, as C++, for the sources in csrc/cuda.
//
// One block runs at a time. Each of its threads is a fiber with a stack of its own; it runs until it waits for its warp
// or its block, then the next one runs. Blocks and threads go forward, in reverse or shuffled: a result that depends on
// the order is a race. A wait that not everybody joins, a lane mask that is not the whole warp and a misaligned 16-byte
// access end the program with a message, as they would make a GPU hang, err or trap.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __host__
#define __shared__ static  // one block at a time
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct dim3 {
  unsigned x;
  explicit dim3(unsigned count = 1) : x(count) {}
};
inline dim3 threadIdx, blockIdx, gridDim;

namespace host_shim {

constexpr int kWarp = 32;
constexpr size_t kStack = 64 * 1024;

// What the tests set and read.
enum Order { kForward, kReverse, kShuffled };
inline int order = kForward;
inline int64_t resident = 3;     // blocks that the "device" holds: few, so that grid-stride loops take several turns
inline int64_t first_block = 0;  // those before it are left out, where only the end of a huge grid is of interest
inline int64_t launches = 0;

[[noreturn]] inline void die(const char* what) {
  std::fprintf(stderr, "host_shim: %s (block %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
  std::abort();
}

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool done = true;
};

// Where the lanes of a warp meet. Two sets of values: a lane may enter the next meeting while others still read this
// one.
struct Warp {
  int arrived, operation;
  uint64_t meetings;
  uint64_t values[2][kWarp];
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::function<void()> body;
  ucontext_t scheduler;
  int arrived = 0;
  uint64_t barriers = 0;
  uint64_t progress = 0;        // counts arrivals and ends
  const void* stack = nullptr;  // the scheduler's, for AddressSanitizer, which wants to be told of every switch
  size_t stack_size = 0;
};
inline Block block;

inline void before_switch([[maybe_unused]] const void* stack, [[maybe_unused]] size_t size) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(nullptr, stack, size);
#endif
}
inline void after_switch([[maybe_unused]] const void** stack, [[maybe_unused]] size_t* size) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, stack, size);
#endif
}

// A fiber hands over to the scheduler, which comes back to it later.
inline void yield() {
  before_switch(block.stack, block.stack_size);
  swapcontext(&block.fibers[threadIdx.x].context, &block.scheduler);
  after_switch(&block.stack, &block.stack_size);
}

inline void fiber_main() {
  after_switch(&block.stack, &block.stack_size);
  for (;;) {
    block.body();
    block.fibers[threadIdx.x].done = true;
    ++block.progress;
    yield();
  }
}

inline void resume(int thread) {
  Fiber& fiber = block.fibers[thread];
  threadIdx.x = thread;
  before_switch(fiber.stack.data(), kStack);
  swapcontext(&block.scheduler, &fiber.context);
  after_switch(nullptr, nullptr);
}

inline void make_fibers(int threads) {
  block.fibers = std::vector<Fiber>(threads);
  for (Fiber& fiber : block.fibers) {
    fiber.stack.resize(kStack);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = kStack;
    makecontext(&fiber.context, fiber_main, 0);
  }
}

inline void run_block(const std::vector<int>& threads) {
  block.warps.assign(threads.size() / kWarp, Warp{});
  block.arrived = 0;
  for (Fiber& fiber : block.fibers) fiber.done = false;
  for (bool any = true; any;) {
    const uint64_t before = block.progress;
    any = false;
    for (const int thread : threads) {
      if (block.fibers[thread].done) continue;
      any = true;
      resume(thread);
    }
    if (any && block.progress == before) die("deadlock: a barrier or warp operation that not every thread reaches");
  }
}

template <class Params>
void launch(void (*kernel)(Params), int64_t blocks, int threads, const Params& args) {
  ++launches;
  if (blocks < 1 || blocks > 0x7fffffff) die("a grid must have 1 to 2^31 - 1 blocks");
  if (block.fibers.size() != static_cast<size_t>(threads)) make_fibers(threads);
  const int64_t first = std::min(first_block, blocks);
  std::vector<int> threads_in_order(threads), blocks_in_order(blocks - first);
  std::iota(threads_in_order.begin(), threads_in_order.end(), 0);
  std::iota(blocks_in_order.begin(), blocks_in_order.end(), static_cast<int>(first));
  const auto arrange = [](std::vector<int>& indices) {
    static std::minstd_rand random;
    if (order == kReverse) std::reverse(indices.begin(), indices.end());
    if (order == kShuffled) std::shuffle(indices.begin(), indices.end(), random);
  };
  arrange(threads_in_order);
  arrange(blocks_in_order);
  gridDim.x = static_cast<unsigned>(blocks);
  block.body = [&] { kernel(args); };
  for (const int index : blocks_in_order) {
    blockIdx.x = index;
    if (order == kShuffled) arrange(threads_in_order);
    run_block(threads_in_order);
  }
}

// All lanes of a warp meet; each leaves a value and sees those of all.
inline const uint64_t* meet(unsigned mask, uint64_t value, int operation) {
  if (mask != 0xffffffffu) die("a lane mask that is not the whole warp");
  Warp& warp = block.warps[threadIdx.x / kWarp];
  if (warp.arrived == 0) warp.operation = operation;
  if (warp.operation != operation) die("lanes of one warp meet in different operations");
  const uint64_t meeting = warp.meetings;
  uint64_t* values = warp.values[meeting % 2];
  values[threadIdx.x % kWarp] = value;
  ++block.progress;
  if (++warp.arrived == kWarp) {
    warp.arrived = 0;
    ++warp.meetings;
  }
  while (warp.meetings == meeting) yield();
  return values;
}

template <class T>
const T* checked(const T* p) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T) != 0) die("a misaligned access");
  return p;
}
template <class T>
T* checked(T* p) {
  return const_cast<T*>(checked(const_cast<const T*>(p)));
}

}  // namespace host_shim

// An index for which launch.cuh keeps no answers: tests change `resident` from one launch to the next.
inline cudaError_t cudaGetDevice(int* device) {
  *device = 1 << 20;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 1;
  return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  *blocks = static_cast<int>(host_shim::resident);
  return cudaSuccess;
}

template <class Params>
cudaError_t cudaLaunchKernel(void (*kernel)(Params), dim3 blocks, dim3 threads, void** args, size_t, cudaStream_t) {
  host_shim::launch(kernel, blocks.x, static_cast<int>(threads.x), *static_cast<const Params*>(args[0]));
  return cudaSuccess;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline void __syncthreads() {
  host_shim::Block& block = host_shim::block;
  const uint64_t barrier = block.barriers;
  ++block.progress;
  if (++block.arrived == static_cast<int>(block.fibers.size())) {
    block.arrived = 0;
    ++block.barriers;
  }
  while (block.barriers == barrier) host_shim::yield();
}

inline float __shfl_xor_sync(unsigned mask, float x, int distance) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint64_t* values = host_shim::meet(mask, bits, 1);
  bits = static_cast<uint32_t>(values[(threadIdx.x ^ distance) % host_shim::kWarp]);
  memcpy(&x, &bits, sizeof x);
  return x;
}

inline unsigned __ballot_sync(unsigned mask, bool vote) {
  const uint64_t* values = host_shim::meet(mask, vote, 2);
  unsigned result = 0;
  for (int lane = 0; lane < host_shim::kWarp; ++lane) result |= static_cast<unsigned>(values[lane]) << lane;
  return result;
}

inline bool __any_sync(unsigned mask, bool vote) {
  const uint64_t* values = host_shim::meet(mask, vote, 3);
  return std::any_of(values, values + host_shim::kWarp, [](uint64_t v) { return v != 0; });
}

inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long x) {
  const unsigned long long old = *host_shim::checked(p);
  *p = old + x;
  return old;
}

inline uint4 __ldg(const uint4* p) { return *host_shim::checked(p); }
inline uint4 __ldcs(const uint4* p) { return *host_shim::checked(p); }
inline uint4 __ldcg(const uint4* p) { return *host_shim::checked(p); }
inline void __stcs(uint4* p, uint4 x) { *host_shim::checked(p) = x; }
inline void __stcg(uint4* p, uint4 x) { *host_shim::checked(p) = x; }
