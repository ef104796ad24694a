// s = x + residual (s = x without one);   y[r,d] = (s[r,d] - mean[r]) * rstd[r] * (offset + gain[d]) + bias[d]
// mean[r] = mean_d s[r,d] for LayerNorm, 0 for RMSNorm;   rstd[r] = 1 / sqrt(mean_d (s[r,d] - mean[r])^2 + eps)
// All (R, D) row-major, R and D may be 0; residual, gain, bias, sum may be null. Saved for backward: s, mean, rstd.
//
// Backward, with g = offset + gain, h = (s - mean) * rstd:
// dx = rstd * (g*dy - h * mean_d(g*dy*h) [- mean_d(g*dy) for LayerNorm]) + dsum;   dgain = sum_r dy*h;   dbias = sum_r dy
#pragma once
#include "cpu.h"

namespace andrea {

template <typename T> struct NormForward {
  const T *x, *residual;
  const acc_t<T> *gain, *bias;
  T *y, *sum;
  acc_t<T> *mean, *rstd;  // (R); mean is null for RMSNorm
  int64_t R, D;
  acc_t<T> eps, offset;  // offset 1 where gains are stored as their distance from 1
};

template <typename T> struct NormBackward {
  const T *dy, *dsum, *s;  // dsum may be null
  const acc_t<T> *gain, *mean, *rstd;
  T* dx;
  acc_t<T> *dgain, *dbias;  // (D); null where not wanted
  acc_t<T>* partials;       // scratch, (2, kPartials, D) on a CPU, (2, norm_partials_cuda(R, D), D) on a GPU
  int64_t R, D;
  acc_t<T> offset;
};

ANDREA_EACH_ISA(template <typename T> void norm_forward_cpu(const NormForward<T>& a);
                template <typename T> void norm_backward_cpu(const NormBackward<T>& a);)

template <typename T> void norm_forward_cuda(const NormForward<T>& a, void* stream);
template <typename T> void norm_backward_cuda(const NormBackward<T>& a, void* stream);
// The most blocks of the backward kernel, each of which leaves a partial: 512 threads for each of an H200's 132
// multiprocessors, 64 or more in a block and no more than 16 columns a thread.
constexpr int64_t norm_partials_cuda(int64_t R, int64_t D) {
  const int64_t most = D <= 1024 ? 132 * 8 : D <= 8192 ? 132 * 8192 / D : 132;
  return R < most ? R : most;
}

}  // namespace andrea
