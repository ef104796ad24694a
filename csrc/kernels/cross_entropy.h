// Per row r with target t and capped logits s = softcap * tanh(logits / softcap) (s = logits without a softcap):
// z[r] = log sum_v exp(s[v]);   nll[r] = z[r] - s[t]
// Of sum_r token_weight[r] * (dnll * nll[r] + dpenalty * z_weight * z[r]^2), written over the logits if wanted:
// dlogits[v] = token_weight[r] * ((dnll + 2 * dpenalty * z_weight * z[r]) * exp(s[v] - z[r]) - dnll * [v = t]) * ds[v]/dlogits[v]
// A row with target kIgnore has nll = z = 0 and dlogits = 0, whatever it holds. logits (R, V), rows `stride` apart; R may be 0.
#pragma once
#include "cpu.h"

namespace andrea {

constexpr int64_t kIgnore = -100;

template <typename T> struct CrossEntropy {
  T* logits;
  const int64_t* target;           // (R)
  const acc_t<T>* token_weight;    // (R), or null for ones
  const acc_t<T>*dnll, *dpenalty;  // one number each, or null for 1
  acc_t<T>*nll, *z;                // (R)
  int64_t R, V, stride;
  acc_t<T> softcap, z_weight;  // softcap 0 for none
  bool gradient;
};

ANDREA_EACH_ISA(template <typename T> void cross_entropy_cpu(const CrossEntropy<T>& a);)

template <typename T> void cross_entropy_cuda(const CrossEntropy<T>& a, void* stream);

}  // namespace andrea
