// For CPU kernels only: instruction sets, threads, and rows as fp32 (or fp64) in the first-level cache.
#pragma once
#include <stdexcept>

#include "base.h"

// A CPU kernel file is compiled once per instruction set, into a namespace of its name; the bindings choose at run time.
#define ANDREA_EACH_ISA(declaration) \
  namespace scalar { declaration }   \
  namespace avx2 { declaration }     \
  namespace avx512 { declaration }

namespace andrea {

// 0 scalar, 1 avx2 (with fma and f16c), 2 avx512: what this machine has, at most what ANDREA_ABLATE_ISA names.
int isa();
#if defined(ANDREA_FIBER)
#define ANDREA_CPU(function, ...) \
  throw std::logic_error(#function ": the library that runs CUDA kernels on a CPU has no other kernels")
#else
#define ANDREA_CPU(function, ...)                                             \
  (andrea::isa() == 2   ? andrea::avx512::function(__VA_ARGS__)               \
   : andrea::isa() == 1 ? andrea::avx2::function(__VA_ARGS__)                 \
                        : andrea::scalar::function(__VA_ARGS__))
#endif

// Run body(begin, end, context) over 0..n in the framework's thread pool, at least `grain` at a time.
void parallel_for(int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);

template <typename Body> static inline void parallel(int64_t n, int64_t grain, const Body& body) {
  parallel_for(n, grain, [](int64_t begin, int64_t end, void* context) { (*static_cast<const Body*>(context))(begin, end); },
               const_cast<Body*>(&body));
}

// The number of row ranges that partial sums are kept for: fixed, so that a sum does not depend on the threads.
constexpr int64_t kPartials = 16;

// Row x[0..n) as the accumulation type: x itself, or a converted copy in `buffer`.
template <typename T> static inline const acc_t<T>* load_row(const T* x, acc_t<T>* buffer, int64_t n) {
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    (void)buffer, (void)n;
    return x;
  } else {
    int64_t i = 0;
#if defined(__F16C__)
    if constexpr (std::is_same_v<T, fp16>)
      for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(buffer + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
#endif
    for (; i < n; ++i) buffer[i] = widen(x[i]);
    return buffer;
  }
}

// Where to compute row y: in place, or in `buffer`, which store_row then rounds into y.
template <typename T> static inline acc_t<T>* row_target(T* y, acc_t<T>* buffer) {
  if constexpr (std::is_same_v<T, acc_t<T>>) return (void)buffer, y;
  else return (void)y, buffer;
}
template <typename T> static inline void store_row(T* y, const acc_t<T>* buffer, int64_t n) {
  if constexpr (!std::is_same_v<T, acc_t<T>>) {
    int64_t i = 0;
#if defined(__F16C__)
    if constexpr (std::is_same_v<T, fp16>)
      for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(y + i), _mm256_cvtps_ph(_mm256_loadu_ps(buffer + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; ++i) y[i] = narrow<T>(buffer[i]);
  }
}

// y[i] = value(i) for a row; fp16, whose conversion gcc does not vectorise, by way of `buffer`.
template <typename T, typename Value> static inline void fill_row(T* y, acc_t<T>* buffer, int64_t n, const Value& value) {
  if constexpr (std::is_same_v<T, fp16>) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) buffer[i] = value(i);
    store_row(y, buffer, n);
  } else {
    (void)buffer;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] = narrow<T>(value(i));
  }
}

}  // namespace andrea
