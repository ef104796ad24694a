#include "../kernels/qk_rope.h"

#include "common.h"

namespace andrea {

// (B, L, heads, K) whose last dimension is packed: itself where that holds, whatever its other strides, else a copy.
static Tensor heads_of(const char* op, const char* name, const Tensor& x, const Tensor& q) {
  STD_TORCH_CHECK(x.dim() == 4, op, ": ", name, " has shape ", shape_of(x), ", expected (batch, length, heads, width)");
  STD_TORCH_CHECK(x.size(0) == q.size(0) && x.size(1) == q.size(1) && x.size(3) == q.size(3) && x.scalar_type() == q.scalar_type() &&
                      x.device() == q.device(),
                  op, ": ", name, " has shape ", shape_of(x), " and q ", shape_of(q),
                  "; expected the same batch, length, width, dtype and device");
  STD_TORCH_CHECK(!on_gpu(x) || (x.size(0) * x.size(1) * x.size(2) < (int64_t(1) << 31) && x.size(3) <= kRopeWidest), op, ": ", name,
                  " has shape ", shape_of(x), "; on a GPU it has fewer than 2^31 heads of at most ", kRopeWidest, " dimensions");
  return x.size(3) <= 1 || x.stride(3) == 1 ? x : torch::stable::contiguous(x);
}

static Tensor packed_like(const Tensor& x) { return torch::stable::new_empty(x, {x.size(0), x.size(1), x.size(2), x.size(3)}); }

template <typename T> static Strided<T> strided(const Tensor& x) { return {data<T>(x), x.stride(0), x.stride(1), x.stride(2)}; }

static MaybeTensor gain_of(const char* op, const char* name, const MaybeTensor& gain, const Tensor& q) {
  return vector_of(op, name, gain, q.size(3), q);
}

struct Tables {
  MaybeTensor cos, sin;
  int64_t R = 0;
  Tables(const char* op, const MaybeTensor& given_cos, const MaybeTensor& given_sin, const Tensor& q) {
    STD_TORCH_CHECK(given_cos.has_value() == given_sin.has_value(), op, ": cos and sin are given both or neither");
    if (!given_cos) return;
    for (const MaybeTensor* table : {&given_cos, &given_sin}) {
      const Tensor& t = **table;
      STD_TORCH_CHECK(t.dim() == 2 && t.size(0) == q.size(1) && 2 * t.size(1) <= q.size(3) && t.size(1) == given_cos->size(1), op,
                      ": a table has shape ", shape_of(t), ", expected (", q.size(1), ", at most ", q.size(3) / 2, ") and cos like sin");
      STD_TORCH_CHECK(t.scalar_type() == acc_dtype(q) && t.device() == q.device(), op,
                      ": a table has not the device of q or not the dtype of its sums, float32 (float64 for float64)");
    }
    cos = packed(*given_cos), sin = packed(*given_sin), R = 2 * cos->size(1);
  }
  template <typename A> RopeTables<A> of(const Tensor& q, double eps, bool interleaved, bool inverse) const {
    return {data<A>(cos), data<A>(sin), q.size(0), q.size(1), q.size(3), R, A(eps), interleaved, inverse};
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> qk_rope(Tensor q, Tensor k, MaybeTensor cos, MaybeTensor sin, MaybeTensor q_gain,
                                                   MaybeTensor k_gain, double eps, bool interleaved) {
  q = heads_of("qk_rope", "q", q, q), k = heads_of("qk_rope", "k", k, q);
  q_gain = gain_of("qk_rope", "q_gain", q_gain, q), k_gain = gain_of("qk_rope", "k_gain", k_gain, q);
  const Tables tables("qk_rope", cos, sin, q);
  const auto empty_rstd = [&](const Tensor& x, const MaybeTensor& gain) {
    return torch::stable::new_empty(x, {gain ? x.size(0) * x.size(1) * x.size(2) : 0}, acc_dtype(x));
  };
  Tensor turned_q = packed_like(q), turned_k = packed_like(k), q_rstd = empty_rstd(q, q_gain), k_rstd = empty_rstd(k, k_gain);
  dispatch("qk_rope", q, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    using A = acc_t<T>;
    const RopeForward<T> a{{strided<T>(q), data<A>(q_gain), data<T>(turned_q), data<A>(q_rstd), q.size(2)},
                           {strided<T>(k), data<A>(k_gain), data<T>(turned_k), data<A>(k_rstd), k.size(2)},
                           tables.of<A>(q, eps, interleaved, false)};
    ANDREA_RUN(q, rope_forward, a);
  });
  return {turned_q, turned_k, q_rstd, k_rstd};
}

// The input and the statistics of a side are needed only where it has a gain.
std::tuple<Tensor, Tensor, Tensor, Tensor> qk_rope_backward(Tensor dy_q, Tensor dy_k, MaybeTensor q, MaybeTensor k, MaybeTensor cos,
                                                            MaybeTensor sin, MaybeTensor q_gain, MaybeTensor k_gain, Tensor q_rstd,
                                                            Tensor k_rstd, bool interleaved) {
  const char* const op = "qk_rope_backward";
  dy_q = heads_of(op, "dy_q", dy_q, dy_q), dy_k = heads_of(op, "dy_k", dy_k, dy_q);
  STD_TORCH_CHECK((q || !q_gain) && (k || !k_gain), op, ": a gain is given without the input it multiplied");
  if (q_gain) q = heads_of(op, "q", *q, dy_q);
  if (k_gain) k = heads_of(op, "k", *k, dy_q);
  q_gain = gain_of(op, "q_gain", q_gain, dy_q), k_gain = gain_of(op, "k_gain", k_gain, dy_q);
  const Tables tables(op, cos, sin, dy_q);
  const int64_t K = dy_q.size(3);
  const ScalarType wide = acc_dtype(dy_q);
  Tensor dq = packed_like(dy_q), dk = packed_like(dy_k);
  Tensor dq_gain = torch::stable::new_empty(dy_q, {q_gain ? K : 0}, wide), dk_gain = torch::stable::new_empty(dy_k, {k_gain ? K : 0}, wide);
  dispatch(op, dy_q, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    using A = acc_t<T>;
    const RopeTables<A> back = tables.of<A>(dy_q, 0, interleaved, true);
    // What has no gain is turned back, both sides in one launch; a side that has one is left out by having no heads.
    const RopeForward<T> turned{{strided<T>(dy_q), nullptr, data<T>(dq), nullptr, q_gain ? 0 : dy_q.size(2)},
                                {strided<T>(dy_k), nullptr, data<T>(dk), nullptr, k_gain ? 0 : dy_k.size(2)},
                                back};
    if (!q_gain || !k_gain) ANDREA_RUN(dy_q, rope_forward, turned);
    const auto normed = [&](const Tensor& dy, const Tensor& x, const MaybeTensor& gain, const Tensor& rstd, Tensor& dx, Tensor& dgain) {
      const int64_t parts = on_gpu(dy) ? rope_partials_cuda(dy.size(0) * dy.size(1) * dy.size(2)) : kPartials;
      const Tensor partials = torch::stable::new_empty(dy, {parts, K}, wide);
      const RopeBackward<T> a{strided<T>(dy), strided<T>(x),  data<A>(gain),     data<A>(rstd), data<T>(dx),
                              data<A>(dgain), data<A>(partials), dy.size(2), back};
      ANDREA_RUN(dy, rope_backward, a);
    };
    if (q_gain) normed(dy_q, *q, q_gain, q_rstd, dq, dq_gain);
    if (k_gain) normed(dy_k, *k, k_gain, k_rstd, dk, dk_gain);
  });
  return {dq, dk, dq_gain, dk_gain};
}

#define KERNELS(m)                        \
  m.impl("qk_rope", TORCH_BOX(&qk_rope)); \
  m.impl("qk_rope_backward", TORCH_BOX(&qk_rope_backward));
ANDREA_REGISTER(KERNELS)

}  // namespace andrea
