#include "norm.h"

#include <cmath>
#include <vector>

namespace andrea::ANDREA_ISA {

// Eight neighbours of a row, wherever it begins.
template <typename A> struct LanesOf {
  typedef A type __attribute__((vector_size(8 * sizeof(A)), aligned(alignof(A)), may_alias));
};
template <typename A> using Lanes = typename LanesOf<A>::type;
template <typename A> static inline const Lanes<A>& lanes_at(const A* x) { return *reinterpret_cast<const Lanes<A>*>(x); }
template <typename A> static inline Lanes<A>& lanes_at(A* x) { return *reinterpret_cast<Lanes<A>*>(x); }
template <typename A> static inline A sum_of(const Lanes<A>& v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// sum_d (x[d] - mean)^kPower in 32 running sums: one alone waits for each addition, and loses more than rounding does over a
// wide row.
template <int kPower, typename A> static inline A sum_of(const A* x, A mean, int64_t D) {
  Lanes<A> sums[4] = {};
  int64_t d = 0;
  for (; d + 32 <= D; d += 32)
    for (int i = 0; i < 4; ++i) {
      const Lanes<A> v = lanes_at(x + d + 8 * i) - mean;
      sums[i] += kPower == 2 ? v * v : v;
    }
  A sum = sum_of<A>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; d < D; ++d) sum += kPower == 2 ? (x[d] - mean) * (x[d] - mean) : x[d] - mean;
  return sum;
}

template <typename T> void norm_forward_cpu(const NormForward<T>& a) {
  using A = acc_t<T>;
  const int64_t D = a.D;
  parallel(a.R, 1 + 32768 / (D + 1), [&](int64_t begin, int64_t end) {
    std::vector<A> buffer(4 * D);
    A *input = buffer.data(), *output = input + D, *g = output + D, *bias = g + D;
    for (int64_t d = 0; d < D; ++d) g[d] = a.gain ? a.offset + a.gain[d] : 1, bias[d] = a.bias ? a.bias[d] : 0;
    for (int64_t r = begin; r < end; ++r) {
      const A* s = load_row(a.x + r * D, input, D);
      if (a.residual) {
        const A* residual = load_row(a.residual + r * D, output, D);
        fill_row(a.sum + r * D, input, D, [&](int64_t d) { return s[d] + residual[d]; });
        s = load_row(a.sum + r * D, input, D);  // rounded as the stream is
      }
      A mean = 0;
      if (a.mean) a.mean[r] = mean = sum_of<1>(s, A(0), D) / D;
      const A squares = sum_of<2>(s, mean, D);
      const A rstd = a.rstd[r] = 1 / std::sqrt(squares / D + a.eps);
      fill_row(a.y + r * D, output, D, [&](int64_t d) { return (s[d] - mean) * rstd * g[d] + bias[d]; });
    }
  });
}

// The gradient of row r; dgain and dbias grow by its share.
template <typename T>
static inline void backward(const NormBackward<T>& a, int64_t r, const acc_t<T>* g, acc_t<T>* buffer, acc_t<T>* dgain, acc_t<T>* dbias) {
  using A = acc_t<T>;
  const int64_t D = a.D;
  const A *dy = load_row(a.dy + r * D, buffer, D), *s = load_row(a.s + r * D, buffer + D, D);
  const A mean = a.mean ? a.mean[r] : 0, rstd = a.rstd[r];
  Lanes<A> dots = {}, totals = {};
  int64_t d = 0;
  for (; d + 8 <= D; d += 8) {
    if (d % 16 == 0) __builtin_prefetch(a.dx + r * D + d, 1);  // written below: waits for memory now, beside the sums
    const Lanes<A> v = lanes_at(dy + d), h = (lanes_at(s + d) - mean) * rstd, gdy = lanes_at(g + d) * v;
    dots += gdy * h, totals += gdy;
    lanes_at(dgain + d) += v * h, lanes_at(dbias + d) += v;
  }
  A dot = sum_of<A>(dots), total = sum_of<A>(totals);
  for (; d < D; ++d) {
    const A v = dy[d], h = (s[d] - mean) * rstd, gdy = g[d] * v;
    dot += gdy * h, total += gdy;
    dgain[d] += v * h, dbias[d] += v;
  }
  const A slope = dot / D, shift = a.mean ? total / D : 0;
  const auto dx = [&](int64_t d) { return rstd * (g[d] * dy[d] - shift - (s[d] - mean) * rstd * slope); };
  A* const output = buffer + 2 * D;
  if (a.dsum) {
    const A* dsum = load_row(a.dsum + r * D, output, D);
    fill_row(a.dx + r * D, output, D, [&](int64_t d) { return dx(d) + dsum[d]; });
  } else {
    fill_row(a.dx + r * D, output, D, dx);
  }
}

template <typename T> void norm_backward_cpu(const NormBackward<T>& a) {
  using A = acc_t<T>;
  const int64_t D = a.D, rows = (a.R + kPartials - 1) / kPartials;
  parallel(kPartials, 1, [&](int64_t first, int64_t last) {
    std::vector<A> buffer(4 * D);
    A* const g = buffer.data() + 3 * D;
    for (int64_t d = 0; d < D; ++d) g[d] = a.gain ? a.offset + a.gain[d] : 1;
    for (int64_t part = first; part < last; ++part) {
      A *dgain = a.partials + part * D, *dbias = a.partials + (kPartials + part) * D;
      for (int64_t d = 0; d < D; ++d) dgain[d] = dbias[d] = 0;
      for (int64_t r = part * rows; r < (part + 1) * rows && r < a.R; ++r) backward(a, r, g, buffer.data(), dgain, dbias);
    }
  });
  for (int64_t part = 0; part < kPartials; ++part) {
    const A *dgain = a.partials + part * D, *dbias = a.partials + (kPartials + part) * D;
    for (int64_t d = 0; a.dgain && d < D; ++d) a.dgain[d] = (part ? a.dgain[d] : 0) + dgain[d];
    for (int64_t d = 0; a.dbias && d < D; ++d) a.dbias[d] = (part ? a.dbias[d] : 0) + dbias[d];
  }
}

#define INSTANTIATE(T)                                     \
  template void norm_forward_cpu<T>(const NormForward<T>&); \
  template void norm_backward_cpu<T>(const NormBackward<T>&);
INSTANTIATE(float) INSTANTIATE(double) INSTANTIATE(bf16) INSTANTIATE(fp16)

}  // namespace andrea::ANDREA_ISA
