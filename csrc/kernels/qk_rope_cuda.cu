#include <cmath>

#include "cuda.h"
#include "qk_rope.h"

namespace andrea {
namespace {

// N neighbours, read and written 16 bytes at a time where N > 1.
template <typename V, int N> struct alignas(N > 1 ? 16 : alignof(V)) Pack { V v[N]; };
template <int N, typename V> __device__ __forceinline__ void load(acc_t<V>* to, const V* from) {
  const Pack<V, N> pack = *reinterpret_cast<const Pack<V, N>*>(from);
#pragma unroll
  for (int j = 0; j < N; ++j) to[j] = widen(pack.v[j]);
}
template <int N, typename V> __device__ __forceinline__ void store(V* to, const acc_t<V>* from) {
  Pack<V, N> pack;
#pragma unroll
  for (int j = 0; j < N; ++j) pack.v[j] = narrow<V>(from[j]);
  *reinterpret_cast<Pack<V, N>*>(to) = pack;
}

// A head belongs to `lanes` threads of a warp, a power of two. They go through it in chunks of two packs of N, which
// hold N whole pairs: side by side where pairs are neighbours and in the part that does not turn, R/2 apart otherwise.
template <typename A, int N> struct Chunks {
  int K, pairs, turning, count, lanes;  // chunks < turning turn
  bool interleaved;
  A sign;

  explicit Chunks(const RopeTables<A>& a)
      : K(int(a.K)), pairs(int(a.R / 2)), turning(pairs / N), count(turning + int(a.K - a.R + 2 * N - 1) / (2 * N)), lanes(1),
        interleaved(a.interleaved), sign(a.inverse ? -1 : 1) {
    while (lanes < count && lanes < 32) lanes *= 2;
  }
  __device__ __forceinline__ bool apart(int c) const { return c < turning && !interleaved; }
  __device__ __forceinline__ int first(int c) const { return apart(c) ? N * c : 2 * N * c; }
  __device__ __forceinline__ int second(int c) const { return first(c) + (apart(c) ? pairs : N); }
  // The last pack of a head of odd width has no second; it is one value then, N is 1.
  template <typename V> __device__ __forceinline__ void read(acc_t<V>* w, const V* from, int c) const {
    load<N>(w, from + first(c));
    if (N > 1 || second(c) < K) load<N>(w + N, from + second(c));
    else w[N] = 0;
  }
  template <typename V> __device__ __forceinline__ void write(V* to, const acc_t<V>* w, int c) const {
    store<N>(to + first(c), w);
    if (N > 1 || second(c) < K) store<N>(to + second(c), w + N);
  }
  __device__ __forceinline__ void turn(A* w, const RopeTables<A>& a, int64_t position, int c) const {
    if (c >= turning) return;
    A cos[N], sin[N];
    load<N>(cos, a.cos + position * pairs + c * N);
    load<N>(sin, a.sin + position * pairs + c * N);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A s = sign * sin[j];
      if (interleaved) {
        const A u = w[2 * j], v = w[2 * j + 1];
        w[2 * j] = u * cos[j] - v * s;
        w[2 * j + 1] = v * cos[j] + u * s;
      } else {
        const A u = w[j], v = w[N + j];
        w[j] = u * cos[j] - v * s;
        w[N + j] = v * cos[j] + u * s;
      }
    }
  }
  // The sum over the lanes of a head, the same bits in each.
  __device__ __forceinline__ A sum(A v) const {
    for (int bits = lanes / 2; bits; bits /= 2) v += __shfl_xor_sync(~0u, v, bits);
    return v;
  }
};

struct Place {
  unsigned head;
  int64_t batch, position;
  __device__ __forceinline__ Place(unsigned row, int64_t heads, int64_t L) {
    const unsigned token = row / unsigned(heads);
    head = row % unsigned(heads), batch = token / unsigned(L), position = token % unsigned(L);
  }
  template <typename T> __device__ __forceinline__ const T* in(const Strided<T>& x) const {
    return x.data + batch * x.batch + position * x.row + head * x.head;
  }
};

constexpr int kThreads = 256;

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) forward(const RopeForward<T> a, const Chunks<acc_t<T>, N> chunks) {
  using A = acc_t<T>;
  const RopeHeads<T> heads = blockIdx.y ? a.k : a.q;
  const int lane = threadIdx.x % chunks.lanes;
  const int64_t rows = a.tables.B * a.tables.L * heads.heads, row = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / chunks.lanes;
  const int end = row < rows ? chunks.count : 0;  // every lane of a warp takes part in its sums
  const Place place(row < rows ? unsigned(row) : 0, heads.heads ? heads.heads : 1, a.tables.L ? a.tables.L : 1);
  const T* const x = place.in(heads.x);
  T* const y = heads.y + row * chunks.K;
  A w[2 * N], rstd = 1;
  if (heads.gain) {
    A squares = 0;
    for (int c = lane; c < end; c += chunks.lanes) {
      chunks.read(w, x, c);
#pragma unroll
      for (int j = 0; j < 2 * N; ++j) squares += w[j] * w[j];
    }
    rstd = 1 / std::sqrt(chunks.sum(squares) / chunks.K + a.tables.eps);
    if (end && lane == 0) heads.rstd[row] = rstd;
  }
  for (int c = lane; c < end; c += chunks.lanes) {
    chunks.read(w, x, c);  // again: from the first-level cache
    if (heads.gain) {
      A gain[2 * N];
      chunks.read(gain, heads.gain, c);
#pragma unroll
      for (int j = 0; j < 2 * N; ++j) w[j] *= rstd * gain[j];
    }
    chunks.turn(w, a.tables, place.position, c);
    chunks.write(y, w, c);
  }
}

// Each block goes through its heads with sums for dgain in shared memory, one of K values for each of the heads that
// it holds at a time, and leaves one partial.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads) backward(const RopeBackward<T> a, const Chunks<acc_t<T>, N> chunks) {
  using A = acc_t<T>;
  ANDREA_DYNAMIC_SHARED(A, sums);
  const int K = chunks.K, lane = threadIdx.x % chunks.lanes, slot = threadIdx.x / chunks.lanes, slots = blockDim.x / chunks.lanes;
  A* const sum = sums + slot * K;
  A w[2 * N], h[2 * N], t[2 * N];
  for (int j = 0; j < 2 * N; ++j) t[j] = 0;
  for (int c = lane; c < chunks.count; c += chunks.lanes) chunks.write(sum, t, c);
  const int64_t rows = a.tables.B * a.tables.L * a.heads;
  for (int64_t base = int64_t(blockIdx.x) * slots; base < rows; base += int64_t(gridDim.x) * slots) {
    const int64_t row = base + slot;
    const int end = row < rows ? chunks.count : 0;
    const Place place(row < rows ? unsigned(row) : 0, a.heads, a.tables.L);
    const T *const dy = place.in(a.dy), *const x = place.in(a.x);
    const A rstd = end ? a.rstd[row] : A(0);
    const auto gather = [&](int c) {  // w = du, h = x * rstd, t = du * gain
      chunks.read(w, dy, c);
      chunks.turn(w, a.tables, place.position, c);
      chunks.read(h, x, c);
      chunks.read(t, a.gain, c);
#pragma unroll
      for (int j = 0; j < 2 * N; ++j) h[j] *= rstd, t[j] *= w[j];
    };
    A dot = 0;
    for (int c = lane; c < end; c += chunks.lanes) {
      gather(c);
      A before[2 * N];
      chunks.read(before, sum, c);
#pragma unroll
      for (int j = 0; j < 2 * N; ++j) {
        before[j] += w[j] * h[j];
        dot += t[j] * h[j];
      }
      chunks.write(sum, before, c);
    }
    dot = chunks.sum(dot) / K;
    for (int c = lane; c < end; c += chunks.lanes) {
      if (chunks.count > chunks.lanes) gather(c);  // else this lane's only chunk is in its registers
#pragma unroll
      for (int j = 0; j < 2 * N; ++j) w[j] = rstd * (t[j] - h[j] * dot);
      chunks.write(a.dx + row * K, w, c);
    }
  }
  __syncthreads();
  for (int d = threadIdx.x; d < K; d += blockDim.x) {
    A total = 0;
    for (int s = 0; s < slots; ++s) total += sums[s * K + d];
    a.partials[int64_t(blockIdx.x) * K + d] = total;
  }
}

// dgain[d] = sum over p of partials[p][d], for 32 columns per block of 32 x 8 threads.
template <typename A> __global__ void __launch_bounds__(kThreads) sum_partials(const A* partials, A* dgain, int parts, int K) {
  __shared__ A column[8][32];
  const int d = blockIdx.x * 32 + threadIdx.x;
  A sum = 0;
  for (int p = threadIdx.y; d < K && p < parts; p += 8) sum += partials[int64_t(p) * K + d];
  column[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y || d >= K) return;
  for (int y = 1; y < 8; ++y) sum += column[y][threadIdx.x];
  dgain[d] = sum;
}

template <typename T, int N> void launch_forward(const RopeForward<T>& a, void* stream) {
  const Chunks<acc_t<T>, N> chunks(a.tables);
  const int64_t most = a.q.heads > a.k.heads ? a.q.heads : a.k.heads, slots = kThreads / chunks.lanes;
  const int64_t blocks = (a.tables.B * a.tables.L * most + slots - 1) / slots;
  launch(forward<T, N>, dim3(unsigned(blocks), 2), dim3(kThreads), 0, stream, a, chunks);
}

template <typename T, int N> void launch_backward(const RopeBackward<T>& a, void* stream) {
  using A = acc_t<T>;
  const Chunks<A, N> chunks(a.tables);
  // A head of more than 32 chunks has a warp; where it is very wide, the block has fewer of them.
  int slots = kThreads / chunks.lanes;
  while (slots > 1 && slots * a.tables.K * sizeof(A) > 48 << 10) slots /= 2;
  const int64_t rows = a.tables.B * a.tables.L * a.heads, wanted = (rows + slots - 1) / slots, most = rope_partials_cuda(rows);
  const int blocks = int(wanted < 1 ? 1 : wanted < most ? wanted : most);
  launch(backward<T, N>, dim3(unsigned(blocks)), dim3(unsigned(slots * chunks.lanes)), slots * a.tables.K * sizeof(A), stream, a, chunks);
  launch(sum_partials<A>, dim3(unsigned((a.tables.K + 31) / 32)), dim3(32, 8), 0, stream, static_cast<const A*>(a.partials), a.dgain,
         blocks, int(a.tables.K));
}

template <int N, typename T> bool vectors(const Strided<T>& x) {
  return aligned16(x.data) && x.batch % N == 0 && x.row % N == 0 && x.head % N == 0;
}
template <int N, typename A> bool vectors(const RopeTables<A>& a) {
  return aligned16(a.cos) && aligned16(a.sin) && a.R % (2 * N) == 0 && a.K % (2 * N) == 0;
}

}  // namespace

template <typename T> void rope_forward_cuda(const RopeForward<T>& a, void* stream) {
  constexpr int N = 16 / sizeof(T);
  if (vectors<N>(a.q.x) && vectors<N>(a.k.x) && vectors<N>(a.tables) && aligned16(a.q.gain) && aligned16(a.k.gain) &&
      aligned16(a.q.y) && aligned16(a.k.y))
    return launch_forward<T, N>(a, stream);
  launch_forward<T, 1>(a, stream);
}

template <typename T> void rope_backward_cuda(const RopeBackward<T>& a, void* stream) {
  constexpr int N = 16 / sizeof(T);
  if (vectors<N>(a.dy) && vectors<N>(a.x) && vectors<N>(a.tables) && aligned16(a.gain) && aligned16(a.dx))
    return launch_backward<T, N>(a, stream);
  launch_backward<T, 1>(a, stream);
}

#define INSTANTIATE(T)                                              \
  template void rope_forward_cuda<T>(const RopeForward<T>&, void*); \
  template void rope_backward_cuda<T>(const RopeBackward<T>&, void*);
INSTANTIATE(float) INSTANTIATE(double) INSTANTIATE(bf16) INSTANTIATE(fp16)

}  // namespace andrea
