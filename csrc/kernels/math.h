// Scalar functions for CPU and CUDA kernels: float without branches or calls, so that a loop over them vectorises;
// double through std. Infinities and NaN as in torch. In units in the last place of a float, exp is within 1 (subnormal
// results too), tanh, sigmoid, erf and silu within 3; gelu and the slopes are within 4 of the larger of result and 1/2.
// csrc/testing/fit_math.py fits the polynomials.
#pragma once
#include <cmath>

#include "base.h"

namespace andrea::math {

// The larger or the smaller; NaN in x stays NaN.
ANDREA_INLINE float at_least(float x, float low) { return x < low ? low : x; }
ANDREA_INLINE float at_most(float x, float high) { return x > high ? high : x; }

// x = n ln 2 + r with n an integer and |r| <= ln(2) / 2, for |x| < 2^20; n is written as float bits, 1.5 2^23 + n.
struct Reduced {
  uint32_t n;  // modulo 2^22
  float r;
};
ANDREA_INLINE Reduced reduce(float x) {
  const float shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
  return {bit_cast<uint32_t>(shifted) - 0x4b400000u, (x - n * 0.693145752f) - n * 1.42860677e-6f};  // n * the first is exact
}
// e^r - 1 for |r| <= ln(2) / 2. Here and below a polynomial is summed in pairs: half the steps wait for one another.
ANDREA_INLINE float expm1_reduced(float r) {
  const float r2 = r * r, low = 0.166665211f * r + 0.49999994f, high = (0.00138145604f * r + 0.0083687352f) * r + 0.041668389f;
  return r + r2 * (low + r2 * high);
}
// 2^n for -126 <= n <= 127.
ANDREA_INLINE float power_of_two(uint32_t n) { return bit_cast<float>((n + 127u) << 23); }

ANDREA_INLINE double exp(double x) { return std::exp(x); }
ANDREA_INLINE float exp(float x) {
  const Reduced reduced = reduce(at_most(at_least(x, -104.0f), 89.0f));  // 0 below, infinite above
  // In two factors: 2^n itself may be subnormal or infinite where the result is not.
  const uint32_t half = uint32_t(int32_t(reduced.n) >> 1);
  return (1.0f + expm1_reduced(reduced.r)) * power_of_two(half) * power_of_two(reduced.n - half);
}

// e^x for x <= 0, with results below the normal range as zero: those are slow on some machines. NaN stays NaN.
ANDREA_INLINE double exp_decay(double x) { return std::exp(x); }
ANDREA_INLINE float exp_decay(float x) {
  const Reduced reduced = reduce(x < -87.0f ? -87.0f : x);
  const float power = (1.0f + expm1_reduced(reduced.r)) * power_of_two(reduced.n);
  return x < -87.0f ? 0.0f : power;
}

ANDREA_INLINE double magnitude(double x) { return std::fabs(x); }
ANDREA_INLINE float magnitude(float x) { return bit_cast<float>(bit_cast<uint32_t>(x) & 0x7fffffffu); }
ANDREA_INLINE float with_sign_of(float positive, float x) {
  return bit_cast<float>(bit_cast<uint32_t>(positive) | (bit_cast<uint32_t>(x) & 0x80000000u));
}

ANDREA_INLINE double tanh(double x) { return std::tanh(x); }
// (e^2|x| - 1) / (e^2|x| + 1), with the sign of x.
ANDREA_INLINE float tanh(float x) {
  const Reduced reduced = reduce(at_most(2.0f * magnitude(x), 20.0f));  // 1 above
  const float scale = power_of_two(reduced.n), e = scale * expm1_reduced(reduced.r) + (scale - 1.0f);
  return with_sign_of(e / (e + 2.0f), x);
}
// 1 - tanh(x)^2 without its cancellation.
template <typename A> ANDREA_INLINE A tanh_slope(A x) {
  const A e = exp_decay(-2 * magnitude(x));
  return 4 * e / ((1 + e) * (1 + e));
}

template <typename A> ANDREA_INLINE A sigmoid(A x) { return 1 / (1 + exp(-x)); }
// sigmoid(x) and its slope s (1 - s), without the cancellation of 1 - s.
template <typename A> struct Logistic { A value, slope; };
template <typename A> ANDREA_INLINE Logistic<A> logistic(A x) {
  const A e = exp_decay(-magnitude(x)), larger = 1 / (1 + e), smaller = e * larger;
  return {x < 0 ? smaller : larger, smaller * larger};
}
template <typename A> ANDREA_INLINE A sigmoid_slope(A x) { return logistic(x).slope; }

// The standard normal distribution: P(X <= x) and its density.
template <typename A> struct Gaussian { A cdf, density; };
ANDREA_INLINE Gaussian<double> gaussian(double x) {
  return {0.5 * std::erfc(-0.70710678118654752 * x), 0.39894228040143268 * std::exp(-0.5 * x * x)};
}
ANDREA_INLINE Gaussian<float> gaussian(float x) {
  const float e = exp_decay(-0.5f * x * x), t = 1.0f / (1.0f + 0.265f * magnitude(x)), t2 = t * t, t4 = t2 * t2;
  const float low = (0.10526678f * t + 0.105740398f) + (0.0608950183f * t + 0.102555089f) * t2;
  const float high = (-0.11428649f * t + 0.136554956f) + (-0.143300682f * t + 0.215950444f) * t2;
  const float tail = (low + (high + 0.0306244828f * t4) * t4) * (t * e);
  return {x < 0.0f ? tail : 1.0f - tail, 0.398942280f * e};
}

ANDREA_INLINE double erf(double x) { return std::erf(x); }
ANDREA_INLINE float erf(float x) {
  const float s = x * x;
  const float high = ((7.85386146e-05f * s - 0.000801019371f) * s + 0.00518832775f) * s - 0.0268538129f;
  const float p = ((high * s + 0.112835854f) * s - 0.37612626f) * s + 0.128379166f;
  const float outer = 2.0f * gaussian(1.41421356f * magnitude(x)).cdf - 1.0f;
  return magnitude(x) < 1.0f ? x + x * p : with_sign_of(outer, x);
}
template <typename A> ANDREA_INLINE A erf_slope(A x) { return A(1.12837916709551257) * exp(-x * x); }

template <typename A> ANDREA_INLINE A relu(A x) { return x < 0 ? 0 : x; }
template <typename A> ANDREA_INLINE A relu_slope(A x) { return x <= 0 ? 0 : 1; }
template <typename A> ANDREA_INLINE A relu2(A x) { return relu(x) * relu(x); }
template <typename A> ANDREA_INLINE A relu2_slope(A x) { return 2 * relu(x); }

template <typename A> ANDREA_INLINE A silu(A x) { return x / (1 + exp(-x)); }
template <typename A> ANDREA_INLINE A silu_slope(A x) {
  const Logistic<A> s = logistic(x);
  return s.value + x * s.slope;
}

template <typename A> ANDREA_INLINE A gelu(A x) { return x * gaussian(x).cdf; }
template <typename A> ANDREA_INLINE A gelu_slope(A x) {
  const Gaussian<A> g = gaussian(x);
  return g.cdf + x * g.density;
}

// x (1 + tanh u) / 2 = x sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
template <typename A> ANDREA_INLINE A gelu_tanh(A x) {
  return x * sigmoid(A(1.59576912160573071) * x * (1 + A(0.044715) * x * x));
}
template <typename A> ANDREA_INLINE A gelu_tanh_slope(A x) {
  const A k = A(1.59576912160573071), c = A(0.044715) * x * x;
  const Logistic<A> s = logistic(k * x * (1 + c));
  return s.value + x * s.slope * k * (1 + 3 * c);
}

}  // namespace andrea::math
