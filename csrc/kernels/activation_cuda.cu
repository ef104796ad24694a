#include "activation.h"
#include "cuda.h"

namespace andrea {
namespace {

constexpr unsigned kThreads = 256, kMostBlocks = 132 * 16;

// V elements that are loaded and stored in one instruction.
template <typename T, int V> struct alignas(V * sizeof(T)) Pack { T v[V]; };
template <int V, typename T> __device__ __forceinline__ Pack<T, V> load(const T* at) {
  return *reinterpret_cast<const Pack<T, V>*>(at);
}
template <int V, typename T> __device__ __forceinline__ void store(T* at, const Pack<T, V>& pack) {
  *reinterpret_cast<Pack<T, V>*>(at) = pack;
}

template <typename T, typename F, bool kGated, int V>
__device__ __forceinline__ void forward_at(const Elementwise<T>& a, int64_t r, int64_t d) {
  const Pack<T, V> x = load<V>(a.x + r * a.x_stride + d);
  Pack<T, V> up, y;
  if constexpr (kGated) up = load<V>(a.up + r * a.up_stride + d);
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const acc_t<T> value = F::value(widen(x.v[i]), a.cap);
    if constexpr (kGated) y.v[i] = narrow<T>(value * widen(up.v[i]));
    else y.v[i] = narrow<T>(value);
  }
  store(a.y + r * a.y_stride + d, y);
}

template <typename T, typename F, bool kGated, int V>
__device__ __forceinline__ void backward_at(const Elementwise<T>& a, int64_t r, int64_t d) {
  const Pack<T, V> x = load<V>(a.x + r * a.x_stride + d), dy = load<V>(a.dy + r * a.dy_stride + d);
  Pack<T, V> up, dx, dup;
  if constexpr (kGated) up = load<V>(a.up + r * a.up_stride + d);
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const acc_t<T> v = widen(x.v[i]), g = widen(dy.v[i]);
    if constexpr (kGated) {
      dx.v[i] = narrow<T>(F::chain(v, g * widen(up.v[i]), a.cap));
      dup.v[i] = narrow<T>(g * F::value(v, a.cap));
    } else {
      dx.v[i] = narrow<T>(F::chain(v, g, a.cap));
    }
  }
  store(a.dx + r * a.dx_stride + d, dx);
  if constexpr (kGated) store(a.dup + r * a.dup_stride + d, dup);
}

template <typename T, typename F, bool kBackward, bool kGated, int V>
__device__ __forceinline__ void element_at(const Elementwise<T>& a, int64_t r, int64_t d) {
  if constexpr (kBackward) backward_at<T, F, kGated, V>(a, r, d);
  else forward_at<T, F, kGated, V>(a, r, d);
}

// V elements per thread and step; where V does not divide F, which only a single row may have, the rest one by one.
template <typename T, typename F, bool kBackward, bool kGated, int V>
__device__ __forceinline__ void sweep(const Elementwise<T>& a) {
  const int64_t per_row = a.F / V, first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
#pragma unroll 1  // the vector is the unrolling
  for (int64_t i = first; i < a.R * per_row; i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t r = a.R == 1 ? 0 : i / per_row;
    element_at<T, F, kBackward, kGated, V>(a, r, (i - r * per_row) * V);
  }
  if (V > 1 && first < a.F - per_row * V) element_at<T, F, kBackward, kGated, 1>(a, 0, per_row * V + first);
}
template <typename T, typename F, bool kBackward, bool kGated>
__global__ void __launch_bounds__(kThreads) wide_kernel(Elementwise<T> a) {
  sweep<T, F, kBackward, kGated, 16 / sizeof(T)>(a);
}
// Any alignment, any function: one kernel, since a kernel of this kind for each function would be built for rare layouts.
template <typename T, bool kBackward, bool kGated>
__global__ void __launch_bounds__(kThreads) narrow_kernel(Elementwise<T> a) {
  with_activation(a, [&](auto act) { sweep<T, decltype(act), kBackward, kGated, 1>(a); });
}

template <typename T> static bool vectors(const Elementwise<T>& a, int64_t V) {
  const struct { const T* at; int64_t stride; } operands[] = {{a.dy, a.dy_stride}, {a.x, a.x_stride},   {a.up, a.up_stride},
                                                              {a.y, a.y_stride},   {a.dx, a.dx_stride}, {a.dup, a.dup_stride}};
  bool aligned = a.R == 1 || a.F % V == 0;
  for (const auto& operand : operands) {
    if (!operand.at) continue;
    aligned = aligned && aligned16(operand.at) && (a.R == 1 || operand.stride % V == 0);
  }
  return aligned;
}

template <bool kBackward, bool kGated, typename T> static void run(const Elementwise<T>& a, void* stream) {
  constexpr int V = sizeof(T) == 8 ? 1 : 16 / sizeof(T);  // two fp64 elements at a time would spill registers
  const bool wide = V > 1 && vectors(a, V);
  const int64_t steps = wide ? a.R * (a.F / V) + a.F % V : a.R * a.F, blocks = (steps + kThreads - 1) / kThreads;
  const dim3 grid(unsigned(blocks < kMostBlocks ? blocks : kMostBlocks)), block(kThreads);
  if (!wide) return launch(narrow_kernel<T, kBackward, kGated>, grid, block, 0, stream, a);
  if constexpr (V > 1) {
    with_activation(a, [&](auto act) {
      if constexpr (!(kGated && std::is_same_v<decltype(act), Softcap<float>>))
        launch(wide_kernel<T, decltype(act), kBackward, kGated>, grid, block, 0, stream, a);
    });
  }
}

}  // namespace

template <typename T> void elementwise_forward_cuda(const Elementwise<T>& a, void* stream) {
  a.up ? run<false, true>(a, stream) : run<false, false>(a, stream);
}
template <typename T> void elementwise_backward_cuda(const Elementwise<T>& a, void* stream) {
  a.up ? run<true, true>(a, stream) : run<true, false>(a, stream);
}

#define INSTANTIATE(T)                                                    \
  template void elementwise_forward_cuda<T>(const Elementwise<T>&, void*); \
  template void elementwise_backward_cuda<T>(const Elementwise<T>&, void*);
INSTANTIATE(float) INSTANTIATE(double) INSTANTIATE(bf16) INSTANTIATE(fp16)

}  // namespace andrea
