// Kernels that are right and kernels with one error each, to show that fiber.h finds it.
#include "../kernels/cuda.h"

namespace andrea {

// out[b] = 1.5 * sum of row b of x: (blocks, n), in two rounds through the same scratch.
template <bool kFirstBarrier, bool kSecondBarrier>
__global__ void row_sum(const float* x, float* out, int n) {
  __shared__ float partial[8];
  float total = 0;
  for (int round = 0; round < 2; ++round) {
    float v = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) v += x[blockIdx.x * n + i] * (round ? 1.0f : 0.5f);
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
    if (kFirstBarrier) __syncthreads();
    for (unsigned w = 0; w < blockDim.x / 32; ++w) total += partial[w];
    if (kSecondBarrier) __syncthreads();
  }
  if (threadIdx.x == 0) out[blockIdx.x] = total;
}

__global__ void block_sums(const float* x, float* out, int n) {
  float v[2] = {0, 0};
  for (int i = threadIdx.x; i < n; i += blockDim.x) v[0] += x[blockIdx.x * n + i], v[1] += 1;
  block_sum(v);
  const float again = block_sum(v[1] / blockDim.x);
  if (threadIdx.x == blockDim.x - 1) out[blockIdx.x] = v[0] + again - float(n);
}

__global__ void copy(const float* x, float* out, int n) {
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) out[i] = x[i];
}
__global__ void copy_one_too_many(const float* x, float* out, int n) {
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (i <= n) out[i] = i < n ? x[i] : 0.0f;
}
__global__ void read_one_too_many(const float* x, float* out, int n) {
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) out[i] = x[i] + 0 * x[i + 1];
}
__global__ void copy_vectors(const float* x, float* out, int n) {
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n / 4) reinterpret_cast<float4*>(out)[i] = reinterpret_cast<const float4*>(x)[i];
}
__global__ void reverse_in_shared(const float* x, float* out, int n) {
  ANDREA_DYNAMIC_SHARED(float, row);
  for (int i = threadIdx.x; i < n; i += blockDim.x) row[i] = x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = row[n - 1 - i];
}
__global__ void leave_early(const float*, float* out, int n) {
  if (int(threadIdx.x) >= n) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}
__global__ void shuffle_in_a_branch(const float*, float* out, int) {
  if (threadIdx.x % 2) out[threadIdx.x] = __shfl_down_sync(~0u, 1.0f, 1);
}
__global__ void exchange(const float* x, float* out, int n) {
  __shared__ float slot[64];
  const int t = threadIdx.x;
  slot[t] = x[t % n];
  __syncwarp();
  const float own_warp = slot[t ^ 1], next = __shfl_down_sync(~0u, x[t % n], 1), seven = __shfl_sync(~0u, x[t % n], 7);
  out[t] = own_warp + 10 * next + 100 * seven + 1000 * float(__ballot_sync(~0u, t % 2) == 0xaaaaaaaau);
}

}  // namespace andrea

extern "C" __attribute__((visibility("default"))) const char* planted(const char* name, const float* x, float* out, int rows,
                                                                     int n, uint64_t seed) {
  using namespace andrea;
  static std::string message;
  fiber::seed(seed);
  const auto is = [&](const char* other) { return !strcmp(name, other); };
  const unsigned blocks = unsigned(n / 32 + 1);
  try {
    if (is("row_sum")) launch(row_sum<true, true>, rows, 256, 0, nullptr, x, out, n);
    else if (is("row_sum without the first barrier")) launch(row_sum<false, true>, rows, 256, 0, nullptr, x, out, n);
    else if (is("row_sum without the second barrier")) launch(row_sum<true, false>, rows, 256, 0, nullptr, x, out, n);
    else if (is("block_sums")) launch(block_sums, rows, 96, 0, nullptr, x, out, n);
    else if (is("copy")) launch(copy, blocks, 32, 0, nullptr, x, out, n);
    else if (is("copy one too many")) launch(copy_one_too_many, blocks, 32, 0, nullptr, x, out, n);
    else if (is("read one too many")) launch(read_one_too_many, blocks, 32, 0, nullptr, x, out, n);
    else if (is("copy vectors")) launch(copy_vectors, blocks, 32, 0, nullptr, x, out, n);
    else if (is("reverse")) launch(reverse_in_shared, 1, 64, n * sizeof(float), nullptr, x, out, n);
    else if (is("reverse with too little shared memory")) launch(reverse_in_shared, 1, 64, (n - 4) * sizeof(float), nullptr, x, out, n);
    else if (is("leave early")) launch(leave_early, 1, 64, 0, nullptr, x, out, n);
    else if (is("shuffle in a branch")) launch(shuffle_in_a_branch, 1, 32, 0, nullptr, x, out, n);
    else if (is("exchange")) launch(exchange, 1, 64, 0, nullptr, x, out, n);
    else if (is("too many threads")) launch(copy, 1, 2048, 0, nullptr, x, out, n);
    else return "no such kernel";
  } catch (const std::exception& error) {
    return (message = error.what()).c_str();
  }
  return nullptr;
}
