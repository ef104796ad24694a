#include "activation.h"

#include <algorithm>

namespace andrea::ANDREA_ISA {

// Elements that are computed at a time: where they are converted, five operands of them stay in the first-level cache.
template <typename T> constexpr bool kConverted = !std::is_same_v<T, acc_t<T>>;
template <typename T> constexpr int64_t kBlock = kConverted<T> ? 512 : 8192;
template <typename T> struct Buffer { alignas(64) acc_t<T> row[kConverted<T> ? kBlock<T> : 1]; };

// body(row, first column, n) over all of (R, F), at most kBlock elements at a time.
template <typename T, typename Body> static void each_block(int64_t R, int64_t F, const Body& body) {
  const int64_t block = kBlock<T>, per_row = (F + block - 1) / block;
  parallel(R * per_row, 1 + 32768 / (std::min(F, block) + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / per_row, first = (i - row * per_row) * block;
      body(row, first, std::min(block, F - first));
    }
  });
}

template <typename T> void elementwise_forward_cpu(const Elementwise<T>& a) {
  using A = acc_t<T>;
  with_activation(a, [&](auto act) {
    const A cap = a.cap;
    each_block<T>(a.R, a.F, [&](int64_t row, int64_t first, int64_t n) {
      Buffer<T> x_buffer, up_buffer, y_buffer;
      T* to = a.y + row * a.y_stride + first;
      const A* x = load_row(a.x + row * a.x_stride + first, x_buffer.row, n);
      A* y = row_target(to, y_buffer.row);
      if (a.up) {
        const A* up = load_row(a.up + row * a.up_stride + first, up_buffer.row, n);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) y[i] = act.value(x[i], cap) * up[i];
      } else {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) y[i] = act.value(x[i], cap);
      }
      store_row(to, y, n);
    });
  });
}

template <typename T> void elementwise_backward_cpu(const Elementwise<T>& a) {
  using A = acc_t<T>;
  with_activation(a, [&](auto act) {
    const A cap = a.cap;
    each_block<T>(a.R, a.F, [&](int64_t row, int64_t first, int64_t n) {
      Buffer<T> x_buffer, up_buffer, dy_buffer, dx_buffer, dup_buffer;
      T* dx_to = a.dx + row * a.dx_stride + first;
      const A* x = load_row(a.x + row * a.x_stride + first, x_buffer.row, n);
      const A* dy = load_row(a.dy + row * a.dy_stride + first, dy_buffer.row, n);
      A* dx = row_target(dx_to, dx_buffer.row);
      if (a.up) {
        const A* up = load_row(a.up + row * a.up_stride + first, up_buffer.row, n);
        T* dup_to = a.dup + row * a.dup_stride + first;
        A* dup = row_target(dup_to, dup_buffer.row);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
          const A d = dy[i], v = x[i];
          dx[i] = act.chain(v, d * up[i], cap);
          dup[i] = d * act.value(v, cap);
        }
        store_row(dup_to, dup, n);
      } else {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) dx[i] = act.chain(x[i], dy[i], cap);
      }
      store_row(dx_to, dx, n);
    });
  });
}

#define INSTANTIATE(T)                                            \
  template void elementwise_forward_cpu<T>(const Elementwise<T>&); \
  template void elementwise_backward_cpu<T>(const Elementwise<T>&);
INSTANTIATE(float) INSTANTIATE(double) INSTANTIATE(bf16) INSTANTIATE(fp16)

}  // namespace andrea::ANDREA_ISA
