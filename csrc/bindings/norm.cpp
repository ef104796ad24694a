#include "../kernels/norm.h"

#include "common.h"

namespace andrea {

static int64_t rows_of(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  return rows;
}

static std::tuple<Tensor, Tensor, Tensor, Tensor> forward(const char* op, Tensor x, MaybeTensor residual, MaybeTensor gain,
                                                          MaybeTensor bias, double eps, bool center, bool unit_offset) {
  STD_TORCH_CHECK(x.dim() >= 1, op, ": x has no dimension to normalise over");
  if (residual) check_same(op, "residual", *residual, x);
  const int64_t D = x.size(x.dim() - 1), R = rows_of(x);
  const ScalarType wide = acc_dtype(x);
  x = packed(x);
  if (residual) residual = packed(*residual);
  gain = vector_of(op, "gain", gain, D, x), bias = vector_of(op, "bias", bias, D, x);
  Tensor y = torch::stable::empty_like(x), sum = residual ? torch::stable::empty_like(x) : x;
  Tensor mean = torch::stable::new_empty(x, {center ? R : 0}, wide), rstd = torch::stable::new_empty(x, {R}, wide);
  dispatch(op, x, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    using A = acc_t<T>;
    const NormForward<T> a{data<T>(x), data<T>(residual), data<A>(gain), data<A>(bias), data<T>(y), data<T>(sum),
                           center ? data<A>(mean) : nullptr, data<A>(rstd), R, D, A(eps), A(unit_offset)};
    ANDREA_RUN(x, norm_forward, a);
  });
  return {y, sum, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> norm(Tensor x, MaybeTensor gain, MaybeTensor bias, double eps, bool center, bool unit_offset) {
  auto [y, sum, mean, rstd] = forward("norm", x, std::nullopt, gain, bias, eps, center, unit_offset);
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_norm(Tensor x, Tensor residual, MaybeTensor gain, MaybeTensor bias, double eps,
                                                    bool center, bool unit_offset) {
  return forward("add_norm", x, residual, gain, bias, eps, center, unit_offset);
}

std::tuple<Tensor, Tensor, Tensor> norm_backward(Tensor dy, MaybeTensor dsum, Tensor s, MaybeTensor gain, Tensor mean, Tensor rstd,
                                                 bool unit_offset) {
  const int64_t D = s.size(s.dim() - 1), R = rows_of(s);
  const ScalarType wide = acc_dtype(s);
  dy = packed(dy), s = packed(s);
  if (dsum) dsum = packed(*dsum);
  gain = vector_of("norm_backward", "gain", gain, D, s);
  Tensor dx = torch::stable::empty_like(s);
  Tensor dgain = torch::stable::new_empty(s, {D}, wide), dbias = torch::stable::new_empty(s, {D}, wide);
  const int64_t parts = on_gpu(s) ? norm_partials_cuda(R, D) : kPartials;
  Tensor partials = torch::stable::new_empty(s, {2, parts, D}, wide);
  dispatch("norm_backward", s, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    using A = acc_t<T>;
    const NormBackward<T> a{data<T>(dy), data<T>(dsum), data<T>(s), data<A>(gain), mean.numel() || !R ? data<A>(mean) : nullptr,
                            data<A>(rstd), data<T>(dx), data<A>(dgain), data<A>(dbias), data<A>(partials), R, D, A(unit_offset)};
    ANDREA_RUN(s, norm_backward, a);
  });
  return {dx, dgain, dbias};
}

#define KERNELS(m)                                \
  m.impl("norm", TORCH_BOX(&norm));               \
  m.impl("add_norm", TORCH_BOX(&add_norm));       \
  m.impl("norm_backward", TORCH_BOX(&norm_backward));
ANDREA_REGISTER(KERNELS)

}  // namespace andrea
