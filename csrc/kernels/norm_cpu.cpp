#include "norm.h"

#include <cmath>
#include <vector>

namespace andrea::ANDREA_ISA {

// sum_d term(d) in 32 running sums: one alone waits for each addition, and loses more than rounding does over a wide row.
template <typename A, typename Term> static inline A sum_of(int64_t D, const Term& term) {
  constexpr int64_t kLanes = 32;
  A lanes[kLanes] = {}, sum = 0;
  int64_t d = 0;
  for (; d + kLanes <= D; d += kLanes) {
#pragma omp simd
    for (int64_t i = 0; i < kLanes; ++i) lanes[i] += term(d + i);
  }
  for (; d < D; ++d) sum += term(d);
  for (int64_t width = kLanes / 2; width > 0; width /= 2)
    for (int64_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return sum + lanes[0];
}

template <typename T> void norm_forward_cpu(const NormForward<T>& a) {
  using A = acc_t<T>;
  const int64_t D = a.D;
  parallel(a.R, 1 + 32768 / (D + 1), [&](int64_t begin, int64_t end) {
    std::vector<A> input(D), output(D);
    for (int64_t r = begin; r < end; ++r) {
      const A* s = load_row(a.x + r * D, input.data(), D);
      if (a.residual) {
        const A* residual = load_row(a.residual + r * D, output.data(), D);
        A* sum = row_target(a.sum + r * D, input.data());
#pragma omp simd
        for (int64_t d = 0; d < D; ++d) sum[d] = s[d] + residual[d];
        store_row(a.sum + r * D, sum, D);
        s = load_row(a.sum + r * D, input.data(), D);  // rounded as the stream is
      }
      A mean = 0;
      if (a.mean) a.mean[r] = mean = sum_of<A>(D, [&](int64_t d) { return s[d]; }) / D;
      const A squares = sum_of<A>(D, [&](int64_t d) { return (s[d] - mean) * (s[d] - mean); });
      const A rstd = a.rstd[r] = 1 / std::sqrt(squares / D + a.eps);
      A* y = row_target(a.y + r * D, output.data());
      if (a.gain && a.bias) {
#pragma omp simd
        for (int64_t d = 0; d < D; ++d) y[d] = (s[d] - mean) * rstd * (a.offset + a.gain[d]) + a.bias[d];
      } else if (a.gain) {
#pragma omp simd
        for (int64_t d = 0; d < D; ++d) y[d] = (s[d] - mean) * rstd * (a.offset + a.gain[d]);
      } else {
        for (int64_t d = 0; d < D; ++d) y[d] = (s[d] - mean) * rstd + (a.bias ? a.bias[d] : 0);
      }
      store_row(a.y + r * D, y, D);
    }
  });
}

template <typename T> void norm_backward_cpu(const NormBackward<T>& a) {
  using A = acc_t<T>;
  const int64_t D = a.D, rows = (a.R + kPartials - 1) / kPartials;
  parallel(kPartials, 1, [&](int64_t first, int64_t last) {
    std::vector<A> buffer(4 * D);
    A *dy_row = buffer.data(), *s_row = dy_row + D, *dx_row = s_row + D, *g = dx_row + D;
    for (int64_t d = 0; d < D; ++d) g[d] = a.gain ? a.offset + a.gain[d] : 1;
    for (int64_t part = first; part < last; ++part) {
      A *dgain = a.partials + part * D, *dbias = a.partials + (kPartials + part) * D;
      for (int64_t d = 0; d < D; ++d) dgain[d] = dbias[d] = 0;
      for (int64_t r = part * rows; r < (part + 1) * rows && r < a.R; ++r) {
        const A *dy = load_row(a.dy + r * D, dy_row, D), *s = load_row(a.s + r * D, s_row, D);
        const A mean = a.mean ? a.mean[r] : 0, rstd = a.rstd[r];
        A dot = 0, total = 0;
#pragma omp simd reduction(+ : dot, total)
        for (int64_t d = 0; d < D; ++d) {
          const A h = (s[d] - mean) * rstd;
          dot += g[d] * dy[d] * h;
          total += g[d] * dy[d];
          dgain[d] += dy[d] * h;
          dbias[d] += dy[d];
        }
        dot /= D;
        total = a.mean ? total / D : 0;
        A* dx = row_target(a.dx + r * D, dx_row);
#pragma omp simd
        for (int64_t d = 0; d < D; ++d) dx[d] = rstd * (g[d] * dy[d] - total - (s[d] - mean) * rstd * dot);
        if (a.dsum) {
          const A* dsum = load_row(a.dsum + r * D, s_row, D);
#pragma omp simd
          for (int64_t d = 0; d < D; ++d) dx[d] += dsum[d];
        }
        store_row(a.dx + r * D, dx, D);
      }
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
