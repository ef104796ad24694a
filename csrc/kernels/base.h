// What every kernel needs: element types, their conversion to the type that sums are held in, rows, and threads.
// No framework header here or in any other kernel file. Helpers are static: each CPU kernel is compiled once per
// instruction set, and a shared inline function would be linked once, for whichever set came first.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#define ANDREA_INLINE static __host__ __device__ __forceinline__
#else
#define ANDREA_INLINE static inline __attribute__((always_inline))
#endif
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace andrea {

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

// The type of statistics and sums: float for everything but double.
template <typename T> using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename To, typename From> ANDREA_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

ANDREA_INLINE double widen(double v) { return v; }
ANDREA_INLINE float widen(float v) { return v; }
ANDREA_INLINE float widen(bf16 v) { return bit_cast<float>(uint32_t(v.bits) << 16); }
ANDREA_INLINE float widen(fp16 v) {
#if defined(__CUDACC__)
  return __half2float(__ushort_as_half(v.bits));
#else
  return float(bit_cast<_Float16>(v.bits));
#endif
}

// Round to nearest, ties to even; NaN stays NaN.
template <typename T> struct narrow_to;
template <> struct narrow_to<double> { ANDREA_INLINE double of(double v) { return v; } };
template <> struct narrow_to<float> { ANDREA_INLINE float of(float v) { return v; } };
template <> struct narrow_to<bf16> {
  ANDREA_INLINE bf16 of(float v) {
    const uint32_t bits = bit_cast<uint32_t>(v);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return {uint16_t(v == v ? rounded : 0x7fc0u)};
  }
};
template <> struct narrow_to<fp16> {
  ANDREA_INLINE fp16 of(float v) {
#if defined(__CUDACC__)
    return {__half_as_ushort(__float2half_rn(v))};
#else
    return {bit_cast<uint16_t>(_Float16(v))};
#endif
  }
};
template <typename T> ANDREA_INLINE T narrow(acc_t<T> v) { return narrow_to<T>::of(v); }

}  // namespace andrea
