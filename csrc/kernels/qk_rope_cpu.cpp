#include "qk_rope.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace andrea::ANDREA_ISA {

// Vectors by hand where the compiler does not find them: it swaps neighbours and sums lanes in many more instructions.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
template <typename A> struct Vector {
  static constexpr int kLanes = kVectorBytes / sizeof(A);
  typedef A type __attribute__((vector_size(kVectorBytes), aligned(alignof(A)), may_alias));
  static inline __attribute__((always_inline)) type& at(A* p) { return *reinterpret_cast<type*>(p); }
  static inline __attribute__((always_inline)) const type& at(const A* p) { return *reinterpret_cast<const type*>(p); }
  // Lane i of the result is lane i ^ Bits of v.
  template <int Bits> static inline __attribute__((always_inline)) type crossed(const type& v) {
    return crossed<Bits>(v, std::make_integer_sequence<int, kLanes>());
  }
  template <int Bits, int... Lane>
  static inline __attribute__((always_inline)) type crossed(const type& v, std::integer_sequence<int, Lane...>) {
    return __builtin_shufflevector(v, v, (Lane ^ Bits)...);
  }
  template <int Bits = kLanes / 2> static inline __attribute__((always_inline)) A sum(type v) {
    v += crossed<Bits>(v);
    if constexpr (Bits == 1) return v[0];
    else return sum<Bits / 2>(v);
  }
};

// A position's turn as two factors for each dimension, shared by its heads: y[d] = u[d] * same[d] + u[partner] * other[d].
template <typename A> static void factors(const RopeTables<A>& a, int64_t position, const A* gain, A* same, A* other) {
  const int64_t P = a.R / 2;
  const A *cos = a.cos + position * P, *sin = a.sin + position * P, sign = a.inverse ? -1 : 1;
  if (a.interleaved) {
#pragma omp simd
    for (int64_t i = 0; i < P; ++i) {
      same[2 * i] = same[2 * i + 1] = cos[i];
      other[2 * i] = -sign * sin[i];
      other[2 * i + 1] = sign * sin[i];
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < P; ++i) {
      same[i] = same[P + i] = cos[i];
      other[i] = -sign * sin[i];
      other[P + i] = sign * sin[i];
    }
  }
  for (int64_t d = a.R; d < a.K; ++d) same[d] = 1;
  if (!gain) return;
  for (int64_t d = 0; d < a.K; ++d) same[d] *= gain[d];
  if (a.interleaved) {
    for (int64_t i = 0; i < P; ++i) other[2 * i] *= gain[2 * i + 1], other[2 * i + 1] *= gain[2 * i];
  } else {
    for (int64_t i = 0; i < P; ++i) other[i] *= gain[P + i], other[P + i] *= gain[i];
  }
}

template <typename A>
static inline __attribute__((always_inline)) void turn(const A* x, const A* same, const A* other, A scale, A* y, int64_t R, int64_t K,
                                                       bool interleaved) {
  if (interleaved) {
    using V = Vector<A>;
    int64_t d = 0;
    for (; d + V::kLanes <= R; d += V::kLanes) {
      const typename V::type v = V::at(x + d);
      V::at(y + d) = (v * V::at(same + d) + V::template crossed<1>(v) * V::at(other + d)) * scale;
    }
    for (; d < R; d += 2) {
      y[d] = (x[d] * same[d] + x[d + 1] * other[d]) * scale;
      y[d + 1] = (x[d + 1] * same[d + 1] + x[d] * other[d + 1]) * scale;
    }
  } else {
    const int64_t P = R / 2;
#pragma omp simd
    for (int64_t i = 0; i < P; ++i) {
      y[i] = (x[i] * same[i] + x[P + i] * other[i]) * scale;
      y[P + i] = (x[P + i] * same[P + i] + x[i] * other[P + i]) * scale;
    }
  }
#pragma omp simd
  for (int64_t d = R; d < K; ++d) y[d] = x[d] * same[d] * scale;
}

template <typename A> static inline __attribute__((always_inline)) A dot(const A* x, const A* y, int64_t K) {
  using V = Vector<A>;
  typename V::type even = {}, odd = {};
  int64_t d = 0;
  for (; d + 2 * V::kLanes <= K; d += 2 * V::kLanes) {
    even += V::at(x + d) * V::at(y + d);
    odd += V::at(x + d + V::kLanes) * V::at(y + d + V::kLanes);
  }
  A total = V::sum(even + odd);
  for (; d < K; ++d) total += x[d] * y[d];
  return total;
}

// Width: K, where it is known at compile time and all of the head turns; 0 otherwise.
template <int Width, typename T> static void forward(const RopeHeads<T>& heads, const RopeTables<acc_t<T>>& a) {
  using A = acc_t<T>;
  const int64_t K = Width ? Width : a.K, R = Width ? Width : a.R, H = heads.heads;
  parallel(H ? a.B * a.L : 0, 1 + 16384 / (H * K + 1), [&](int64_t begin, int64_t end) {
    std::vector<A> buffer(4 * K);
    A *same = buffer.data(), *other = same + K, *input = other + K, *output = input + K;
    for (int64_t token = begin; token < end; ++token) {
      factors(a, token % a.L, heads.gain, same, other);
      const T* first = heads.x.data + token / a.L * heads.x.batch + token % a.L * heads.x.row;
      for (int64_t n = 0; n < H; ++n) {
        const A* x = load_row(first + n * heads.x.head, input, K);
        T* const row = heads.y + (token * H + n) * K;
        A* y = row_target(row, output);
        A rstd = 1;
        if (heads.gain) {
          const A squares = dot(x, x, K);
          heads.rstd[token * H + n] = rstd = 1 / std::sqrt(squares / K + a.eps);
        }
        turn(x, same, other, rstd, y, R, K, a.interleaved);
        store_row(row, y, K);
      }
    }
  });
}

template <int Width, typename T> static void backward(const RopeBackward<T>& heads) {
  using A = acc_t<T>;
  const RopeTables<A>& a = heads.tables;
  const int64_t K = Width ? Width : a.K, R = Width ? Width : a.R, H = heads.heads;
  const int64_t tokens = a.B * a.L, share = (tokens + kPartials - 1) / kPartials, block = 1 + 256 / (H + 1);
  parallel(kPartials, 1, [&](int64_t first, int64_t last) {
    std::vector<A> buffer(7 * K);
    A *same = buffer.data(), *other = same + K, *dy_row = other + K, *x_row = dy_row + K, *dx_row = x_row + K;
    A *du = dx_row + K, *sum = du + K;
    for (int64_t part = first; part < last; ++part) {
      A* const dgain = heads.partials + part * K;
      std::fill(dgain, dgain + K, A(0));
      const int64_t end = std::min(tokens, (part + 1) * share);
      for (int64_t start = part * share; start < end; start += block) {
        std::fill(sum, sum + K, A(0));  // of one block of tokens: many small sums lose less than one long one
        for (int64_t token = start; token < std::min(end, start + block); ++token) {
          const int64_t b = token / a.L, l = token % a.L;
          factors<A>(a, l, nullptr, same, other);
          for (int64_t n = 0; n < H; ++n) {
            const A* dy = load_row(heads.dy.data + b * heads.dy.batch + l * heads.dy.row + n * heads.dy.head, dy_row, K);
            const A* x = load_row(heads.x.data + b * heads.x.batch + l * heads.x.row + n * heads.x.head, x_row, K);
            const A rstd = heads.rstd[token * H + n];
            turn(dy, same, other, A(1), du, R, K, a.interleaved);
#pragma omp simd
            for (int64_t d = 0; d < K; ++d) {
              sum[d] += du[d] * (x[d] * rstd);
              du[d] *= heads.gain[d];
            }
            const A mean = dot(du, x, K) * rstd / K;
            T* const row = heads.dx + (token * H + n) * K;
            A* dx = row_target(row, dx_row);
#pragma omp simd
            for (int64_t d = 0; d < K; ++d) dx[d] = rstd * (du[d] - x[d] * rstd * mean);
            store_row(row, dx, K);
          }
        }
        for (int64_t d = 0; d < K; ++d) dgain[d] += sum[d];
      }
    }
  });
  for (int64_t d = 0; d < K; ++d) {
    heads.dgain[d] = 0;
    for (int64_t part = 0; part < kPartials; ++part) heads.dgain[d] += heads.partials[part * K + d];
  }
}

// Call body with an integral constant: K where it is one of the usual ones and all of it turns, else 0.
template <typename A, typename Body> static void known_width(const RopeTables<A>& a, const Body& body) {
  const int64_t known = a.R == a.K ? a.K : 0;
  if (known == 32) return body(std::integral_constant<int, 32>());
  if (known == 64) return body(std::integral_constant<int, 64>());
  if (known == 128) return body(std::integral_constant<int, 128>());
  body(std::integral_constant<int, 0>());
}

template <typename T> void rope_forward_cpu(const RopeForward<T>& a) {
  known_width(a.tables, [&](auto width) {
    forward<width>(a.q, a.tables);
    forward<width>(a.k, a.tables);
  });
}

template <typename T> void rope_backward_cpu(const RopeBackward<T>& a) {
  known_width(a.tables, [&](auto width) { backward<width>(a); });
}

#define INSTANTIATE(T)                                     \
  template void rope_forward_cpu<T>(const RopeForward<T>&); \
  template void rope_backward_cpu<T>(const RopeBackward<T>&);
INSTANTIATE(float) INSTANTIATE(double) INSTANTIATE(bf16) INSTANTIATE(fp16)

}  // namespace andrea::ANDREA_ISA
