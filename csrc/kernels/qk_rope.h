// Per head x[0..K) of a query or key at position l:
// u[d] = x[d] * rstd * gain[d],  rstd = 1 / sqrt(mean_d x[d]^2 + eps);   u = x where there is no gain
// y[a] = u[a] cos[l,i] - u[b] sin[l,i],  y[b] = u[b] cos[l,i] + u[a] sin[l,i]   for the pairs i < R/2,
//   (a, b) = (2i, 2i + 1) interleaved, (i, i + R/2) otherwise;   y[d] = u[d] for d >= R
// x: q (B, L, H, K) and k (B, L, G, K) with any strides but 1 for K; y packed; cos, sin: (L, R/2) packed; any size may
// be 0. Saved for backward where there is a gain: x, rstd.
//
// Backward: du is dy turned by the opposite angles. dgain = sum du * x * rstd;  with t = du * gain and h = x * rstd
// dx = rstd * (t - h * mean_d(t*h)). Without gain dx = du, which is the forward pass with `inverse`.
#pragma once
#include "cpu.h"

namespace andrea {

template <typename T> struct Strided {  // (B, L, heads, K) with K packed
  const T* data;
  int64_t batch, row, head;
};

template <typename A> struct RopeTables {
  const A *cos, *sin;  // null where R is 0
  int64_t B, L, K, R;
  A eps;
  bool interleaved, inverse;
};

template <typename T> struct RopeHeads {
  Strided<T> x;
  const acc_t<T>* gain;  // (K) or null
  T* y;
  acc_t<T>* rstd;  // (B, L, heads); null without gain
  int64_t heads;
};

template <typename T> struct RopeForward {
  RopeHeads<T> q, k;
  RopeTables<acc_t<T>> tables;
};

template <typename T> struct RopeBackward {  // of a side that has a gain
  Strided<T> dy, x;
  const acc_t<T>*gain, *rstd;
  T* dx;
  acc_t<T>*dgain, *partials;  // (K); scratch, (kPartials, K) on a CPU, (rope_partials_cuda(B * L * heads), K) on a GPU
  int64_t heads;
  RopeTables<acc_t<T>> tables;
};

ANDREA_EACH_ISA(template <typename T> void rope_forward_cpu(const RopeForward<T>& a);
                template <typename T> void rope_backward_cpu(const RopeBackward<T>& a);)

// K is at most kRopeWidest on a GPU, and B * L * heads below 2^31.
constexpr int64_t kRopeWidest = 6144;
template <typename T> void rope_forward_cuda(const RopeForward<T>& a, void* stream);
template <typename T> void rope_backward_cuda(const RopeBackward<T>& a, void* stream);
// At most one partial for each block: 132 multiprocessors of 1024 threads in blocks of 256.
constexpr int64_t rope_partials_cuda(int64_t rows) { return rows < 1 ? 1 : rows < 528 ? rows : 528; }

}  // namespace andrea
