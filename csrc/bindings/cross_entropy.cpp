#include "../kernels/cross_entropy.h"

#include "common.h"

namespace andrea {

static void check_vector(const char* name, const Tensor& v, int64_t n) {
  STD_TORCH_CHECK(v.dim() == 1 && v.size(0) == n, "cross_entropy: ", name, " has shape ", shape_of(v), ", expected (", n, ")");
}

void cross_entropy(Tensor logits, Tensor target, MaybeTensor token_weight, MaybeTensor dnll, MaybeTensor dpenalty, double softcap,
                   double z_weight, bool gradient, Tensor nll, Tensor z) {
  const char* op = "cross_entropy";
  STD_TORCH_CHECK(logits.dim() == 2 && (logits.stride(1) == 1 || logits.size(1) <= 1), op, ": logits has shape ", shape_of(logits),
                  ", expected (N, V) with packed rows");
  const int64_t R = logits.size(0), V = logits.size(1);
  const ScalarType wide = acc_dtype(logits);
  check_vector("target", target, R), check_vector("nll", nll, R), check_vector("z", z, R);
  STD_TORCH_CHECK(target.scalar_type() == ScalarType::Long, op, ": target has dtype ", int(target.scalar_type()), ", expected int64");
  STD_TORCH_CHECK(nll.scalar_type() == wide && z.scalar_type() == wide && nll.is_contiguous() && z.is_contiguous(), op,
                  ": nll and z must be packed float32, float64 for float64 logits");
  target = packed(target);
  token_weight = vector_of(op, "token_weight", token_weight, R, logits);
  for (MaybeTensor* scale : {&dnll, &dpenalty})
    if (*scale) {
      STD_TORCH_CHECK((*scale)->numel() == 1, op, ": the gradient of a sum has shape ", shape_of(**scale), ", expected one number");
      if ((*scale)->scalar_type() != wide) *scale = torch::stable::to(**scale, wide);
    }
  dispatch(op, logits, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    using A = acc_t<T>;
    const CrossEntropy<T> a{data<T>(logits), data<int64_t>(target), data<A>(token_weight), data<A>(dnll), data<A>(dpenalty), data<A>(nll),
                            data<A>(z), R, V, logits.stride(0), A(softcap), A(z_weight), gradient};
    for (int64_t r = 0; logits.is_cpu() && r < R; ++r)  // a GPU, which can't raise an error without waiting, answers with NaN
      STD_TORCH_CHECK((a.target[r] >= 0 && a.target[r] < V) || a.target[r] == kIgnore, op, ": target ", a.target[r],
                      " is neither in [0, ", V, ") nor ", kIgnore);
    ANDREA_RUN(logits, cross_entropy, a);
  });
}

#define KERNELS(m) m.impl("cross_entropy", TORCH_BOX(&cross_entropy));
ANDREA_REGISTER(KERNELS)

}  // namespace andrea
