#include "cuda.h"
#include "norm.h"

namespace andrea {
namespace {

// V neighbours of a row, read and written as one where V > 1: 16 bytes of T.
template <typename T, int V> struct alignas(V > 1 ? 16 : alignof(T)) Pack { T v[V]; };
template <typename T> constexpr int kWide = 16 / sizeof(T);

template <int V, typename T> __device__ __forceinline__ void load(acc_t<T> (&to)[V], const T* from) {
  const Pack<T, V> pack = *reinterpret_cast<const Pack<T, V>*>(from);
#pragma unroll
  for (int v = 0; v < V; ++v) to[v] = widen(pack.v[v]);
}
template <int V, typename T> __device__ __forceinline__ void store(T* to, const acc_t<T> (&from)[V]) {
  Pack<T, V> pack;
#pragma unroll
  for (int v = 0; v < V; ++v) pack.v[v] = narrow<T>(from[v]);
  *reinterpret_cast<Pack<T, V>*>(to) = pack;
}

// A row belongs to the blockDim.x threads of one threadIdx.y; more than one row shares a block only where a row is one
// warp's. Each thread holds I packs of V values in registers. Rows too wide for that are read again in each pass (kLong).
constexpr int kThreads = 512, kRowsPerBlock = 4;

template <typename T, int V, int I> __global__ void __launch_bounds__(kThreads) forward(const NormForward<T> a) {
  using A = acc_t<T>;
  const int64_t r = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (r >= a.R) return;
  const int D = int(a.D), step = blockDim.x * V, first = threadIdx.x * V;
  const int64_t row = r * a.D;
  A s[I][V], sum = 0;
#pragma unroll
  for (int i = 0; i < I; ++i) {
    const int d = first + i * step;
    if (d >= D) continue;
    load(s[i], a.x + row + d);
    if (a.residual) {
      A residual[V];
      load(residual, a.residual + row + d);
#pragma unroll
      for (int v = 0; v < V; ++v) s[i][v] = widen(narrow<T>(s[i][v] + residual[v]));  // rounded as the stream is
      store(a.sum + row + d, s[i]);
    }
#pragma unroll
    for (int v = 0; v < V; ++v) sum += s[i][v];
  }
  const A mean = a.mean ? block_sum(sum) / D : A(0);
  A squares = 0;
#pragma unroll
  for (int i = 0; i < I; ++i)
    if (first + i * step < D)
#pragma unroll
      for (int v = 0; v < V; ++v) squares += (s[i][v] - mean) * (s[i][v] - mean);
  const A rstd = 1 / sqrt(block_sum(squares) / D + a.eps);
  if (threadIdx.x == 0) {
    if (a.mean) a.mean[r] = mean;
    a.rstd[r] = rstd;
  }
#pragma unroll
  for (int i = 0; i < I; ++i) {
    const int d = first + i * step;
    if (d >= D) continue;
    A gain[V], bias[V];
    if (a.gain) load(gain, a.gain + d);
    if (a.bias) load(bias, a.bias + d);
#pragma unroll
    for (int v = 0; v < V; ++v)
      s[i][v] = (s[i][v] - mean) * rstd * (a.gain ? a.offset + gain[v] : A(1)) + (a.bias ? bias[v] : A(0));
    store(a.y + row + d, s[i]);
  }
}

template <typename T> __global__ void __launch_bounds__(kThreads) forward_long(const NormForward<T> a) {
  using A = acc_t<T>;
  const int64_t r = blockIdx.x, D = a.D;
  const T* s = a.residual ? a.sum + r * D : a.x + r * D;
  A sum = 0, squares = 0;
  for (int64_t d = threadIdx.x; d < D; d += blockDim.x) {
    if (a.residual) a.sum[r * D + d] = narrow<T>(widen(a.x[r * D + d]) + widen(a.residual[r * D + d]));
    sum += widen(s[d]);
  }
  const A mean = a.mean ? block_sum(sum) / D : A(0);
  for (int64_t d = threadIdx.x; d < D; d += blockDim.x) squares += (widen(s[d]) - mean) * (widen(s[d]) - mean);
  const A rstd = 1 / sqrt(block_sum(squares) / D + a.eps);
  if (threadIdx.x == 0) {
    if (a.mean) a.mean[r] = mean;
    a.rstd[r] = rstd;
  }
  for (int64_t d = threadIdx.x; d < D; d += blockDim.x) {
    const A gain = a.gain ? a.offset + a.gain[d] : A(1), bias = a.bias ? a.bias[d] : A(0);
    a.y[r * D + d] = narrow<T>((widen(s[d]) - mean) * rstd * gain + bias);
  }
}

// Each block goes through its rows with the sums for dgain and dbias in registers and leaves one partial of each.
template <typename T, int V, int I> __global__ void __launch_bounds__(kThreads) backward(const NormBackward<T> a) {
  using A = acc_t<T>;
  const int D = int(a.D), step = blockDim.x * V, first = threadIdx.x * V;
  A dgain[I][V] = {}, dbias[I][V] = {};
  for (int64_t r = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; r < a.R; r += int64_t(gridDim.x) * blockDim.y) {
    const int64_t row = r * a.D;
    const A mean = a.mean ? a.mean[r] : A(0), rstd = a.rstd[r];
    A gdy[I][V], h[I][V], sums[2] = {};
#pragma unroll
    for (int i = 0; i < I; ++i) {
      const int d = first + i * step;
      if (d >= D) continue;
      A gain[V];
      load(gdy[i], a.dy + row + d);
      load(h[i], a.s + row + d);
      if (a.gain) load(gain, a.gain + d);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        h[i][v] = (h[i][v] - mean) * rstd;
        dgain[i][v] += gdy[i][v] * h[i][v];
        dbias[i][v] += gdy[i][v];
        if (a.gain) gdy[i][v] *= a.offset + gain[v];
        sums[0] += gdy[i][v] * h[i][v];
        sums[1] += gdy[i][v];
      }
    }
    block_sum(sums);
    const A dot = sums[0] / D, total = a.mean ? sums[1] / D : A(0);
#pragma unroll
    for (int i = 0; i < I; ++i) {
      const int d = first + i * step;
      if (d >= D) continue;
      A dsum[V];
      if (a.dsum) load(dsum, a.dsum + row + d);
#pragma unroll
      for (int v = 0; v < V; ++v) gdy[i][v] = rstd * (gdy[i][v] - total - h[i][v] * dot) + (a.dsum ? dsum[v] : A(0));
      store(a.dx + row + d, gdy[i]);
    }
  }
  A* part[2] = {a.partials + blockIdx.x * a.D, a.partials + (gridDim.x + blockIdx.x) * a.D};
  for (unsigned turn = 0; turn < blockDim.y; ++turn) {
    if (threadIdx.y == turn)
#pragma unroll
      for (int i = 0; i < I; ++i) {
        const int d = first + i * step;
        if (d >= D) continue;
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          A before[V] = {};
          if (turn) load(before, part[which] + d);
#pragma unroll
          for (int v = 0; v < V; ++v) before[v] += which ? dbias[i][v] : dgain[i][v];
          store(part[which] + d, before);
        }
      }
    __syncthreads();
  }
}

template <typename T> __global__ void __launch_bounds__(kThreads) backward_long(const NormBackward<T> a) {
  using A = acc_t<T>;
  const int64_t D = a.D;
  A *dgain = a.partials + blockIdx.x * D, *dbias = a.partials + (gridDim.x + blockIdx.x) * D;
  // A thread meets the same columns in every row, so it is alone with its sums.
  for (int64_t d = threadIdx.x; d < D; d += blockDim.x) dgain[d] = dbias[d] = 0;
  for (int64_t r = blockIdx.x; r < a.R; r += gridDim.x) {
    const int64_t row = r * D;
    const A mean = a.mean ? a.mean[r] : A(0), rstd = a.rstd[r];
    A sums[2] = {};
    for (int64_t d = threadIdx.x; d < D; d += blockDim.x) {
      const A dy = widen(a.dy[row + d]), h = (widen(a.s[row + d]) - mean) * rstd, gdy = a.gain ? dy * (a.offset + a.gain[d]) : dy;
      dgain[d] += dy * h;
      dbias[d] += dy;
      sums[0] += gdy * h;
      sums[1] += gdy;
    }
    block_sum(sums);
    const A dot = sums[0] / D, total = a.mean ? sums[1] / D : A(0);
    for (int64_t d = threadIdx.x; d < D; d += blockDim.x) {
      const A dy = widen(a.dy[row + d]), h = (widen(a.s[row + d]) - mean) * rstd, gdy = a.gain ? dy * (a.offset + a.gain[d]) : dy;
      a.dx[row + d] = narrow<T>(rstd * (gdy - total - h * dot) + (a.dsum ? widen(a.dsum[row + d]) : A(0)));
    }
  }
}

// out[which][d] = sum over p of partials[which][p][d], for 32 columns of one `which` per block of 32 x 32 threads.
template <typename A>
__global__ void __launch_bounds__(1024) sum_partials(const A* partials, A* dgain, A* dbias, int64_t parts, int64_t D) {
  __shared__ A column[32][33];
  A* const out = blockIdx.y ? dbias : dgain;
  if (!out) return;
  const int64_t d = int64_t(blockIdx.x) * 32 + threadIdx.x;
  A sum = 0;
  if (d < D)
    for (int64_t p = threadIdx.y; p < parts; p += 32) sum += partials[(blockIdx.y * parts + p) * D + d];
  column[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  sum = warp_sum(column[threadIdx.x][threadIdx.y]);
  const int64_t summed = int64_t(blockIdx.x) * 32 + threadIdx.y;
  if (threadIdx.x == 0 && summed < D) out[summed] = sum;
}

// Threads for a row of which each can hold `values`, rows for a block of so many threads.
unsigned threads_for(int64_t D, int values) { return unsigned(D <= 32 * values ? 32 : (D + 32 * values - 1) / (32 * values) * 32); }
dim3 block_for(int64_t D, int values) {
  const unsigned threads = threads_for(D, values);
  return dim3(threads, threads == 32 ? kRowsPerBlock : 1);
}

template <typename T, int V, int I> void launch_forward(const NormForward<T>& a, void* stream) {
  if (a.D > kThreads * V * I) return launch(forward_long<T>, dim3(unsigned(a.R)), dim3(kThreads), 0, stream, a);
  const dim3 block = block_for(a.D, V * I);
  launch(forward<T, V, I>, dim3(unsigned((a.R + block.y - 1) / block.y)), block, 0, stream, a);
}

template <typename T, int V, int I> void launch_backward(const NormBackward<T>& a, void* stream) {
  using A = acc_t<T>;
  const bool fits = a.D <= kThreads * V * I;
  const dim3 block = fits ? block_for(a.D, V * I) : dim3(kThreads);
  // As norm_partials_cuda counts; a constant, so that sums are the same on every GPU.
  const int64_t wanted = (a.R + block.y - 1) / block.y, most = 132 * 512 / (block.x * block.y);
  const unsigned blocks = unsigned(wanted < most ? wanted : most);
  if (blocks > norm_partials_cuda(a.R, a.D)) throw std::logic_error("norm_backward_cuda: more blocks than partials");
  launch(fits ? backward<T, V, I> : backward_long<T>, dim3(blocks), block, 0, stream, a);
  launch(sum_partials<A>, dim3(unsigned((a.D + 31) / 32), 2), dim3(32, 32), 0, stream, static_cast<const A*>(a.partials), a.dgain,
         a.dbias, int64_t(blocks), a.D);
}

template <typename... Pointers> bool vectors(int64_t D, int V, const Pointers*... pointers) {
  return D % V == 0 && (aligned16(pointers) && ...);
}

}  // namespace

// Values per thread: as many as the registers of 512 threads hold, and fewer where a row is a short one of one warp.
template <typename T> void norm_forward_cuda(const NormForward<T>& a, void* stream) {
  constexpr int V = kWide<T>;
  if constexpr (!std::is_same_v<T, double>)
    if (vectors(a.D, V, a.x, a.residual, a.gain, a.bias, a.y, a.sum))
      return a.D <= 32 * 8 ? launch_forward<T, V, 8 / V>(a, stream) : launch_forward<T, V, 32 / V>(a, stream);
  launch_forward<T, 1, 16>(a, stream);
}

template <typename T> void norm_backward_cuda(const NormBackward<T>& a, void* stream) {
  constexpr int V = kWide<T>;
  if constexpr (!std::is_same_v<T, double>)
    if (vectors(a.D, V, a.dy, a.dsum, a.s, a.gain, a.dx, a.partials))
      return a.D <= 32 * 8 ? launch_backward<T, V, 8 / V>(a, stream) : launch_backward<T, V, 16 / V>(a, stream);
  launch_backward<T, 1, 8>(a, stream);
}

#define INSTANTIATE(T)                                              \
  template void norm_forward_cuda<T>(const NormForward<T>&, void*); \
  template void norm_backward_cuda<T>(const NormBackward<T>&, void*);
INSTANTIATE(float) INSTANTIATE(double) INSTANTIATE(bf16) INSTANTIATE(fp16)

}  // namespace andrea
