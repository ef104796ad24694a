// Query l sits at position i = M - L + l and sees the keys j of max(0, i - window + 1) <= j <= i that key_mask allows.
// s[j] = scale * q[b,l,h] . k[b,j,h / (H/G)];   s = cap * tanh(s / cap) with a soft-cap;   s += bias[h, min(i - j, R - 1)] - slope[h] * (i - j)
// lse[b,h,l] = log(sum_j exp s[j] + exp sink[h]);   p[j] = exp(s[j] - lse);   out[b,l,h] = sum_j p[j] v[b,j,h / (H/G)]
// A query that sees nothing has out 0; its lse is -inf, or the sink. q, k, v are read by their strides, the last of which is 1.
// Saved for backward: the inputs, out and lse. No array of the size L * M exists, forward or backward.
//
// Backward: dp[j] = dout . v[j];   ds = p * (dp - dout . out + dlse);   dbias[h,r] = sum ds at that distance;
// du = ds * (1 - tanh^2) with a soft-cap, else ds;   dq = scale * sum_j du[j] k[j];   dk[j] = scale * sum_i du[i,j] q[i];
// dv[j] = sum_i p[i,j] dout[i];   dsink[h] = sum_i exp(sink - lse) * (dlse - dout . out)
#pragma once
#include "cpu.h"

namespace andrea {

struct Strides {
  int64_t batch, position, head;
};

template <typename T> struct AttentionInputs {
  const T *q, *k, *v;  // (B, L, H, K), (B, M, G, K) twice
  Strides q_stride, k_stride, v_stride;
  const acc_t<T> *slopes, *bias, *sinks;  // (H), (H, R), (H); may be null
  const uint8_t* key_mask;                // (B, M), not 0 where a key may be seen; may be null
  int64_t B, L, M, H, G, K, R;            // M >= L, G divides H
  int64_t window;                         // 0 for all keys
  acc_t<T> scale, softcap;                // softcap 0 for none
};

template <typename T> struct AttentionForward {
  AttentionInputs<T> in;
  T* out;         // (B, L, H, K)
  acc_t<T>* lse;  // (B, H, L)
};

template <typename T> struct AttentionBackward {
  AttentionInputs<T> in;
  const T *out, *dout;
  Strides dout_stride;
  const acc_t<T> *lse, *dlse;  // dlse may be null
  T *dq, *dk, *dv;
  acc_t<T> *dbias, *dsinks;  // (H, R), (H); null where not wanted
  // Scratch: dk and dv of each query head (2, B, H, M, K), null where H = G; dbias (B, H, R) and dsinks (B, H) of each batch.
  acc_t<T> *head_dkv, *batch_dbias, *batch_dsinks;
};

ANDREA_EACH_ISA(template <typename T> void attention_forward_cpu(const AttentionForward<T>& a);
                template <typename T> void attention_backward_cpu(const AttentionBackward<T>& a);)

}  // namespace andrea
