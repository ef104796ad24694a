// For CUDA kernels only: launches and reductions. With ANDREA_FIBER the same kernels run on a CPU, for tests.
#pragma once
#include "base.h"
#if defined(ANDREA_FIBER)
#include "../testing/fiber.h"  // __global__, threadIdx, __shared__, __syncthreads, shuffles and andrea::launch on fibers
#else
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

// Dynamic shared memory: `T* name` over the bytes that launch was given.
#define ANDREA_DYNAMIC_SHARED(T, name)                       \
  extern __shared__ __align__(16) unsigned char name##_raw[]; \
  T* const name = reinterpret_cast<T*>(name##_raw)

namespace andrea {
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, void* stream, Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;  // an empty launch is an error that a later call would report
  cudaError_t status = cudaSuccess;
  if (shared_bytes > 48 << 10)  // more has to be asked for; 99 KiB is what every GPU from compute capability 8.0 has
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
  if (status == cudaSuccess) {
    kernel<<<grid, block, shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments...);
    status = cudaGetLastError();
  }
  if (status != cudaSuccess) throw std::runtime_error(std::string("andrea_ablate: launch failed: ") + cudaGetErrorString(status));
}
}  // namespace andrea
#endif

namespace andrea {

// The sum over a warp, the same bits in every lane.
template <typename A> __device__ __forceinline__ A warp_sum(A v) {
#pragma unroll
  for (int bits = 16; bits; bits >>= 1) v += __shfl_xor_sync(~0u, v, bits);
  return v;
}
template <typename A> __device__ __forceinline__ A warp_max(A v) {
#pragma unroll
  for (int bits = 16; bits; bits >>= 1) {
    const A other = __shfl_xor_sync(~0u, v, bits);
    v = v > other || v != v ? v : other;  // NaN stays
  }
  return v;
}

// The N sums over a block of 32 to 1024 threads in x (whole warps), the same bits in every thread. Calls may follow each other.
template <int N, typename A> __device__ __forceinline__ void block_sum(A (&v)[N]) {
  __shared__ A partial[N][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = warp_sum(v[i]);
  if (warps == 1) return;
  __syncthreads();  // the readers of an earlier call are done
  if (lane == 0)
    for (int i = 0; i < N; ++i) partial[i][warp] = v[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = warp_sum(lane < warps ? partial[i][lane] : A(0));
}
template <typename A> __device__ __forceinline__ A block_sum(A v) {
  A one[1] = {v};
  block_sum(one);
  return one[0];
}

// Whether an array may be read 16 bytes at a time.
ANDREA_INLINE bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace andrea
