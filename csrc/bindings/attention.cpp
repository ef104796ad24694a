#include "../kernels/attention.h"

#include "common.h"

namespace andrea {

static void check_heads(const char* op, const char* name, const Tensor& t, const Tensor& q) {
  STD_TORCH_CHECK(t.dim() == 4 && t.scalar_type() == q.scalar_type() && t.device() == q.device() && t.size(0) == q.size(0) && t.size(3) == q.size(3),
                  op, ": ", name, " has shape ", shape_of(t), " and q ", shape_of(q), "; expected the same batch, d_head, dtype and device");
}

// Read by strides: no copy unless the last dimension is not packed.
static Tensor rows_of_heads(const Tensor& x) { return x.numel() == 0 || x.size(3) == 1 || x.stride(3) == 1 ? x : torch::stable::contiguous(x); }

static Strides strides_of(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(2)}; }

struct Given {
  Tensor q, k, v;
  MaybeTensor slopes, bias, sinks, key_mask;
  double scale;
  int64_t window;
  double softcap;
  ScalarType wide;

  Given(const char* op, const Tensor& q_, const Tensor& k_, const Tensor& v_, const MaybeTensor& slopes_, const MaybeTensor& bias_,
        const MaybeTensor& sinks_, const MaybeTensor& key_mask_, double scale, int64_t window, double softcap)
      : q(q_), k(k_), v(v_), slopes(slopes_), bias(bias_), sinks(sinks_), key_mask(key_mask_), scale(scale), window(window),
        softcap(softcap), wide(acc_dtype(q_)) {
    STD_TORCH_CHECK(q.dim() == 4, op, ": q has shape ", shape_of(q), ", expected (B, L, H, K)");
    check_heads(op, "k", k, q);
    check_heads(op, "v", v, q);
    STD_TORCH_CHECK(k.size(1) == v.size(1) && k.size(2) == v.size(2), op, ": k has shape ", shape_of(k), " and v ", shape_of(v), "; expected the same");
    STD_TORCH_CHECK(k.size(1) >= q.size(1), op, ": ", k.size(1), " keys for ", q.size(1), " queries, expected at least as many");
    STD_TORCH_CHECK(q.size(2) == 0 || (k.size(2) > 0 && q.size(2) % k.size(2) == 0), op, ": ", k.size(2), " key/value heads must divide ", q.size(2), " query heads");
    STD_TORCH_CHECK(window >= 0, op, ": window is ", window, ", expected at least 1, or 0 for none");
    STD_TORCH_CHECK(softcap >= 0, op, ": softcap is ", softcap, ", expected more than 0, or 0 for none");
    const int64_t H = q.size(2);
    slopes = vector_of(op, "slopes", slopes, H, q), sinks = vector_of(op, "sinks", sinks, H, q);
    if (bias) {
      STD_TORCH_CHECK(bias->dim() == 2 && bias->size(0) == H && bias->size(1) > 0, op, ": bias has shape ", shape_of(*bias), ", expected (", H, ", distances)");
      bias = packed(bias->scalar_type() == wide ? *bias : torch::stable::to(*bias, wide));
    }
    if (key_mask) {
      STD_TORCH_CHECK(key_mask->dim() == 2 && key_mask->scalar_type() == ScalarType::Bool && key_mask->size(0) == q.size(0) && key_mask->size(1) == k.size(1),
                      op, ": key_mask has shape ", shape_of(*key_mask), ", expected a bool (", q.size(0), ", ", k.size(1), ")");
      key_mask = packed(*key_mask);
    }
    q = rows_of_heads(q), k = rows_of_heads(k), v = rows_of_heads(v);
  }

  template <typename T> AttentionInputs<T> inputs() const {
    using A = acc_t<T>;
    return {data<T>(q), data<T>(k), data<T>(v), strides_of(q), strides_of(k), strides_of(v), data<A>(slopes), data<A>(bias),
            data<A>(sinks), data<uint8_t>(key_mask), q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3),
            bias ? bias->size(1) : 0, window, A(scale), A(softcap)};
  }
};

std::tuple<Tensor, Tensor> attention(Tensor q, Tensor k, Tensor v, MaybeTensor slopes, MaybeTensor bias, MaybeTensor sinks,
                                     MaybeTensor key_mask, double scale, int64_t window, double softcap) {
  const Given given("attention", q, k, v, slopes, bias, sinks, key_mask, scale, window, softcap);
  Tensor out = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2), q.size(3)});
  Tensor lse = torch::stable::new_empty(q, {q.size(0), q.size(2), q.size(1)}, given.wide);
  dispatch("attention", q, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const AttentionForward<T> a{given.inputs<T>(), data<T>(out), data<acc_t<T>>(lse)};
    ANDREA_CPU(attention_forward_cpu, a);
  });
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(Tensor dout, MaybeTensor dlse, Tensor q, Tensor k, Tensor v,
                                                                      Tensor out, Tensor lse, MaybeTensor slopes, MaybeTensor bias,
                                                                      MaybeTensor sinks, MaybeTensor key_mask, double scale,
                                                                      int64_t window, double softcap) {
  const Given given("attention_backward", q, k, v, slopes, bias, sinks, key_mask, scale, window, softcap);
  const int64_t B = q.size(0), L = q.size(1), M = k.size(1), H = q.size(2), G = k.size(2), K = q.size(3), R = bias ? bias->size(1) : 0;
  check_same("attention_backward", "dout", dout, q);
  check_same("attention_backward", "out", out, q);
  dout = rows_of_heads(dout), out = packed(out), lse = packed(lse);
  if (dlse) check_same("attention_backward", "dlse", *dlse, lse), dlse = packed(*dlse);
  Tensor dq = torch::stable::new_empty(q, {B, L, H, K}), dk = torch::stable::new_empty(q, {B, M, G, K}), dv = torch::stable::new_empty(q, {B, M, G, K});
  Tensor dbias = torch::stable::new_empty(q, {bias ? H : 0, R}, given.wide), dsinks = torch::stable::new_empty(q, {sinks ? H : 0}, given.wide);
  Tensor head_dkv = torch::stable::new_empty(q, {2, H == G ? 0 : B, H, M, K}, given.wide);
  Tensor batch_dbias = torch::stable::new_empty(q, {bias ? B : 0, H, R}, given.wide), batch_dsinks = torch::stable::new_empty(q, {sinks ? B : 0, H}, given.wide);
  dispatch("attention_backward", q, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    using A = acc_t<T>;
    const AttentionBackward<T> a{given.inputs<T>(),
                                 data<T>(out),
                                 data<T>(dout),
                                 strides_of(dout),
                                 data<A>(lse),
                                 data<A>(dlse),
                                 data<T>(dq),
                                 data<T>(dk),
                                 data<T>(dv),
                                 bias ? data<A>(dbias) : nullptr,
                                 sinks ? data<A>(dsinks) : nullptr,
                                 H == G ? nullptr : data<A>(head_dkv),
                                 bias ? data<A>(batch_dbias) : nullptr,
                                 sinks ? data<A>(batch_dsinks) : nullptr};
    ANDREA_CPU(attention_backward_cpu, a);
  });
  return {dq, dk, dv, dbias, dsinks};
}

STABLE_TORCH_LIBRARY_IMPL(andrea_ablate, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
}

}  // namespace andrea
