// y = act(x) * up   (up = 1 without one),   dx = dy * up * act'(x),   dup = dy * act(x),   element by element.
// (R, F) with a row stride per operand and packed rows; R and F may be 0. Saved for backward: x and up, nothing else.
#pragma once
#include "cpu.h"
#include "math.h"

namespace andrea {

enum class Act { identity, relu, relu2, gelu, gelu_tanh, silu, softcap };

template <typename T> struct Elementwise {
  const T *dy, *x, *up;  // dy is null in the forward pass, up where there is no product
  T *y, *dx, *dup;       // y in the forward pass, the other two in the backward pass
  int64_t dy_stride, x_stride, up_stride, y_stride, dx_stride, dup_stride;
  int64_t R, F;
  Act act;
  acc_t<T> cap;  // of softcap
};

ANDREA_EACH_ISA(template <typename T> void elementwise_forward_cpu(const Elementwise<T>& a);
                template <typename T> void elementwise_backward_cpu(const Elementwise<T>& a);)

template <typename T> void elementwise_forward_cuda(const Elementwise<T>& a, void* stream);
template <typename T> void elementwise_backward_cuda(const Elementwise<T>& a, void* stream);

// value(x, cap) = act(x);   chain(x, d, cap) = d * act'(x), 0 where a ReLU is off, whatever d is.
template <typename A> struct Identity {
  ANDREA_INLINE A value(A x, A) { return x; }
  ANDREA_INLINE A chain(A, A d, A) { return d; }
};
template <typename A> struct ReLU {
  ANDREA_INLINE A value(A x, A) { return math::relu(x); }
  ANDREA_INLINE A chain(A x, A d, A) { return x <= 0 ? 0 : d; }
};
template <typename A> struct ReLU2 {
  ANDREA_INLINE A value(A x, A) { return math::relu2(x); }
  ANDREA_INLINE A chain(A x, A d, A) { return x <= 0 ? 0 : d * math::relu2_slope(x); }
};
template <typename A> struct GELU {
  ANDREA_INLINE A value(A x, A) { return math::gelu(x); }
  ANDREA_INLINE A chain(A x, A d, A) { return d * math::gelu_slope(x); }
};
template <typename A> struct GELUTanh {
  ANDREA_INLINE A value(A x, A) { return math::gelu_tanh(x); }
  ANDREA_INLINE A chain(A x, A d, A) { return d * math::gelu_tanh_slope(x); }
};
template <typename A> struct SiLU {
  ANDREA_INLINE A value(A x, A) { return math::silu(x); }
  ANDREA_INLINE A chain(A x, A d, A) { return d * math::silu_slope(x); }
};
template <typename A> struct Softcap {
  ANDREA_INLINE A value(A x, A cap) { return cap * math::tanh(x / cap); }
  ANDREA_INLINE A chain(A x, A d, A cap) { return d * math::tanh_slope(x / cap); }
};

// Call body with an object of the class that a.act names.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable  // the body may be for the host or for the device
#endif
template <typename T, typename Body> ANDREA_INLINE void with_activation(const Elementwise<T>& a, const Body& body) {
  using A = acc_t<T>;
  switch (a.act) {
    case Act::identity: return body(Identity<A>{});
    case Act::relu: return body(ReLU<A>{});
    case Act::relu2: return body(ReLU2<A>{});
    case Act::gelu: return body(GELU<A>{});
    case Act::gelu_tanh: return body(GELUTanh<A>{});
    case Act::silu: return body(SiLU<A>{});
    case Act::softcap: return body(Softcap<A>{});
  }
}

}  // namespace andrea
