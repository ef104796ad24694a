#include <limits>

#include "cross_entropy.h"
#include "cuda.h"
#include "math.h"

namespace andrea {
namespace {

// One block per row: once over it for maximum and sum, as far as known, and once more for the gradient.
constexpr int kThreads = 512;

// Constants, because a call of std::numeric_limits is the host's.
template <typename A> constexpr A kInfinity = std::numeric_limits<A>::infinity();
template <typename A> constexpr A kNaN = std::numeric_limits<A>::quiet_NaN();

template <typename T, int W> struct alignas(W * sizeof(T)) Pack { T v[W]; };

template <typename A> __device__ __forceinline__ A larger(A a, A b) { return a > b || a != a ? a : b; }  // NaN stays

// The largest of v over the block, the same in every thread.
template <typename A> __device__ __forceinline__ A block_max(A v) {
  __shared__ A partial[kThreads / 32];
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  v = warp_max(v);
  if (lane == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  return warp_max(lane < warps ? partial[lane] : -kInfinity<A>);
}

template <typename T> struct Row {
  using A = acc_t<T>;
  A softcap, top = -kInfinity<A>, sum = 0;  // sum of exp(s - top)

  __device__ __forceinline__ A capped(T logit) const {
    return softcap > 0 ? softcap * math::tanh(widen(logit) / softcap) : widen(logit);
  }
  __device__ __forceinline__ A slope(A s) const { return softcap > 0 ? 1 - s / softcap * (s / softcap) : A(1); }

  template <int W> __device__ __forceinline__ void add(const Pack<T, W>& logits) {
    A s[W], next = top;
#pragma unroll
    for (int i = 0; i < W; ++i) next = larger(s[i] = capped(logits.v[i]), next);
    if (next == -kInfinity<A>) return;
    sum *= math::exp(top - next);
#pragma unroll
    for (int i = 0; i < W; ++i) sum += math::exp(s[i] - next);
    top = next;
  }

  template <int W> __device__ __forceinline__ Pack<T, W> gradient(const Pack<T, W>& logits, A scale, A taken, int target) const {
    Pack<T, W> d;
#pragma unroll
    for (int i = 0; i < W; ++i) {
      const A s = capped(logits.v[i]);
      d.v[i] = narrow<T>((scale * math::exp(s - top) - (i == target ? taken : A(0))) * slope(s));
    }
    return d;
  }
};

template <typename T, int W> __global__ void __launch_bounds__(kThreads) cross_entropy(const CrossEntropy<T> a) {
  using A = acc_t<T>;
  const int64_t r = blockIdx.x, target = a.target[r];
  T* const logits = a.logits + r * a.stride;
  const int V = int(a.V), body = V / W * W, thread = threadIdx.x, threads = blockDim.x;
  if (target < 0 || target >= V) {
    const A value = target == kIgnore ? A(0) : kNaN<A>;
    for (int v = thread; a.gradient && v < V; v += threads) logits[v] = narrow<T>(value);
    if (thread == 0) a.nll[r] = a.z[r] = value;
    return;
  }
  const int t = int(target);
  Row<T> row{a.softcap};
  const A at_target = row.capped(logits[t]);  // before anything is written over it
  for (int v = thread * W; v < body; v += threads * W) row.add(*reinterpret_cast<const Pack<T, W>*>(logits + v));
  for (int v = body + thread; v < V; v += threads) row.add(*reinterpret_cast<const Pack<T, 1>*>(logits + v));
  const A top = block_max(row.top);
  const A sum = block_sum(row.top == -kInfinity<A> ? A(0) : row.sum * math::exp(row.top - top));
  const A z = top + std::log(sum);
  if (thread == 0) a.nll[r] = z - at_target, a.z[r] = z;
  if (!a.gradient) return;
  const A weight = a.token_weight ? a.token_weight[r] : 1, taken = weight * (a.dnll ? *a.dnll : 1);
  const A scale = (taken + 2 * weight * (a.dpenalty ? *a.dpenalty : 1) * a.z_weight * z) / sum;
  row.top = top;
  for (int v = thread * W; v < body; v += threads * W) {
    auto* const at = reinterpret_cast<Pack<T, W>*>(logits + v);
    *at = row.gradient(*at, scale, taken, t - v);
  }
  for (int v = body + thread; v < V; v += threads) {
    auto* const at = reinterpret_cast<Pack<T, 1>*>(logits + v);
    *at = row.gradient(*at, scale, taken, t - v);
  }
}

}  // namespace

template <typename T> void cross_entropy_cuda(const CrossEntropy<T>& a, void* stream) {
  constexpr int W = 16 / sizeof(T);
  const bool wide = aligned16(a.logits) && a.stride * sizeof(T) % 16 == 0;
  const int64_t packs = wide ? (a.V + W - 1) / W : a.V;
  const int threads = packs < kThreads ? int(packs + 31) / 32 * 32 : kThreads;
  const dim3 grid(static_cast<unsigned>(a.R)), block(threads > 0 ? threads : 32);
  if (wide) launch(cross_entropy<T, W>, grid, block, 0, stream, a);
  else launch(cross_entropy<T, 1>, grid, block, 0, stream, a);
}

#define INSTANTIATE(T) template void cross_entropy_cuda<T>(const CrossEntropy<T>&, void*);
INSTANTIATE(float) INSTANTIATE(double) INSTANTIATE(bf16) INSTANTIATE(fp16)

}  // namespace andrea
