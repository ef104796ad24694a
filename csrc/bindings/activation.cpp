#include "../kernels/activation.h"

#include <algorithm>
#include <vector>

#include "common.h"

namespace andrea {

static Act act_of(const char* op, const std::string& kind) {
  static constexpr struct { const char* name; Act act; } kKinds[] = {{"identity", Act::identity}, {"relu", Act::relu},
                                                                    {"relu2", Act::relu2},       {"gelu", Act::gelu},
                                                                    {"gelu_tanh", Act::gelu_tanh}, {"silu", Act::silu}};
  std::string names;
  for (const auto& known : kKinds) {
    if (kind == known.name) return known.act;
    names += (names.empty() ? "" : ", ") + std::string(known.name);
  }
  STD_TORCH_CHECK(false, op, ": kind '", kind, "' is not one of ", names);
  return Act::identity;
}

static int64_t width(const Tensor& x) { return x.dim() ? x.size(x.dim() - 1) : 1; }

// Rows of the last dimension: packed themselves, and at one distance from each other.
struct Rows {
  Tensor tensor;
  int64_t stride;
};
static Rows rows(const Tensor& x) {
  if (x.is_contiguous()) return {x, width(x)};
  int64_t stride = -1, expected = -1;
  bool regular = x.stride(x.dim() - 1) == 1 || x.size(x.dim() - 1) == 1;
  for (int64_t i = x.dim() - 2; regular && i >= 0; --i) {
    if (x.size(i) == 1) continue;
    if (stride < 0) stride = expected = x.stride(i);
    regular = x.stride(i) == expected;
    expected *= x.size(i);
  }
  if (regular && stride >= 0) return {x, stride};
  return {packed(x), width(x)};
}

// Fill in sizes and kind, and run. Where every operand is packed, all is one row.
template <typename T> static void run(Elementwise<T> a, const Tensor& like, int64_t F, Act act, double cap = 1) {
  a.F = F, a.R = F ? like.numel() / width(like) : 0, a.act = act, a.cap = acc_t<T>(cap);
  bool one_row = true;
  for (const auto& [at, stride] : {std::pair<const T*, int64_t>{a.dy, a.dy_stride}, {a.x, a.x_stride}, {a.up, a.up_stride},
                                   {a.y, a.y_stride}, {a.dx, a.dx_stride}, {a.dup, a.dup_stride}})
    one_row = one_row && (!at || stride == F);
  if (one_row) a.F *= a.R, a.R = 1;
  if (a.dx) ANDREA_RUN(like, elementwise_backward, a);
  else ANDREA_RUN(like, elementwise_forward, a);
}

static Tensor unary(const char* op, const Tensor& x, Act act, double cap = 1) {
  const Tensor y = torch::stable::new_empty(x, x.sizes());
  dispatch(op, x, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Rows in = rows(x);
    Elementwise<T> a{};
    a.x = data<T>(in.tensor), a.x_stride = in.stride, a.y = data<T>(y), a.y_stride = width(x);
    run(a, x, width(x), act, cap);
  });
  return y;
}

static Tensor unary_backward(const char* op, const Tensor& dy, const Tensor& x, Act act, double cap = 1) {
  check_same(op, "dy", dy, x);
  const Tensor dx = torch::stable::new_empty(x, x.sizes());
  dispatch(op, x, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Rows in = rows(x), d = rows(dy);
    Elementwise<T> a{};
    a.dy = data<T>(d.tensor), a.dy_stride = d.stride, a.x = data<T>(in.tensor), a.x_stride = in.stride;
    a.dx = data<T>(dx), a.dx_stride = width(x);
    run(a, x, width(x), act, cap);
  });
  return dx;
}

Tensor activation(Tensor x, std::string kind) { return unary("activation", x, act_of("activation", kind)); }
Tensor activation_backward(Tensor dy, Tensor x, std::string kind) {
  return unary_backward("activation_backward", dy, x, act_of("activation_backward", kind));
}

static void check_cap(const char* op, double cap) {
  STD_TORCH_CHECK(cap > 0 && cap < 1e38, op, ": cap is ", cap, ", expected a finite number above 0");
}
Tensor softcap(Tensor x, double cap) { return check_cap("softcap", cap), unary("softcap", x, Act::softcap, cap); }
Tensor softcap_backward(Tensor dy, Tensor x, double cap) {
  return check_cap("softcap_backward", cap), unary_backward("softcap_backward", dy, x, Act::softcap, cap);
}

// The shape of act(gate) * up: that of both, or half of a gate that holds both.
static std::vector<int64_t> product_shape(const char* op, const Tensor& gate, const MaybeTensor& up) {
  std::vector<int64_t> shape(gate.sizes().begin(), gate.sizes().end());
  if (up) return check_same(op, "up", *up, gate), shape;
  STD_TORCH_CHECK(gate.dim() && width(gate) % 2 == 0, op, ": gate has shape ", shape_of(gate),
                  "; without up its last dimension must be even");
  shape.back() /= 2;
  return shape;
}

Tensor gated(Tensor gate, MaybeTensor up, std::string kind) {
  const Act act = act_of("gated", kind);
  const Tensor y = torch::stable::new_empty(gate, product_shape("gated", gate, up));
  dispatch("gated", gate, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int64_t F = width(y);
    const Rows x = rows(gate), u = up ? rows(*up) : x;
    Elementwise<T> a{};
    a.x = data<T>(x.tensor), a.x_stride = x.stride, a.up = data<T>(u.tensor) + (up ? 0 : F), a.up_stride = u.stride;
    a.y = data<T>(y), a.y_stride = F;
    run(a, gate, F, act);
  });
  return y;
}

std::tuple<Tensor, Tensor> gated_backward(Tensor dy, Tensor gate, MaybeTensor up, std::string kind) {
  const char* op = "gated_backward";
  const Act act = act_of(op, kind);
  std::vector<int64_t> shape = product_shape(op, gate, up);
  STD_TORCH_CHECK(dy.dim() == gate.dim() && std::equal(shape.begin(), shape.end(), dy.sizes().begin()) &&
                      dy.scalar_type() == gate.scalar_type() && dy.device() == gate.device(),
                  op, ": dy has shape ", shape_of(dy), " and gate ", shape_of(gate), "; expected those of the forward pass");
  const Tensor dgate = torch::stable::new_empty(gate, gate.sizes());
  const Tensor dup = torch::stable::new_empty(gate, up ? shape : std::vector<int64_t>{0});
  dispatch(op, gate, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int64_t F = width(dy);
    const Rows d = rows(dy), x = rows(gate), u = up ? rows(*up) : x;
    Elementwise<T> a{};
    a.dy = data<T>(d.tensor), a.dy_stride = d.stride, a.x = data<T>(x.tensor), a.x_stride = x.stride;
    a.up = data<T>(u.tensor) + (up ? 0 : F), a.up_stride = u.stride;
    a.dx = data<T>(dgate), a.dx_stride = width(gate);
    a.dup = up ? data<T>(dup) : a.dx + F, a.dup_stride = width(gate);
    run(a, gate, F, act);
  });
  return {dgate, dup};
}

#define KERNELS(m)                                                \
  m.impl("activation", TORCH_BOX(&activation));                   \
  m.impl("activation_backward", TORCH_BOX(&activation_backward)); \
  m.impl("gated", TORCH_BOX(&gated));                             \
  m.impl("gated_backward", TORCH_BOX(&gated_backward));           \
  m.impl("softcap", TORCH_BOX(&softcap));                         \
  m.impl("softcap_backward", TORCH_BOX(&softcap_backward));
ANDREA_REGISTER(KERNELS)

}  // namespace andrea
