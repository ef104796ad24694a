#include "cross_entropy.h"

#include <cmath>
#include <limits>
#include <vector>

#include "math.h"

namespace andrea::ANDREA_ISA {

template <typename T> void cross_entropy_cpu(const CrossEntropy<T>& a) {
  using A = acc_t<T>;
  const int64_t V = a.V;
  const A dnll = a.dnll ? *a.dnll : 1, dpenalty = a.dpenalty ? *a.dpenalty : 1;
  parallel(a.R, 1 + 16384 / (V + 1), [&](int64_t begin, int64_t end) {
    std::vector<A> buffer(V);
    for (int64_t r = begin; r < end; ++r) {
      T* row = a.logits + r * a.stride;
      const int64_t t = a.target[r];
      if (t == kIgnore) {
        a.nll[r] = a.z[r] = 0;
        for (int64_t v = 0; a.gradient && v < V; ++v) row[v] = narrow<T>(0);
        continue;
      }
      const A* s = load_row(row, buffer.data(), V);
      if (a.softcap > 0) {
        A* capped = buffer.data();
        const A cap = a.softcap;  // a local, or the loop would not vectorise
#pragma omp simd
        for (int64_t v = 0; v < V; ++v) capped[v] = cap * math::tanh(s[v] / cap);
        s = capped;
      }
      A top = -std::numeric_limits<A>::infinity(), sum = 0;
#pragma omp simd reduction(max : top)
      for (int64_t v = 0; v < V; ++v) top = s[v] > top ? s[v] : top;
#pragma omp simd reduction(+ : sum)
      for (int64_t v = 0; v < V; ++v) sum += math::exp(s[v] - top);
      const A log_sum = std::log(sum), z = top + log_sum;
      a.z[r] = z, a.nll[r] = (top - s[t]) + log_sum;  // z is larger, and rounded more coarsely
      if (!a.gradient) continue;
      const A weight = a.token_weight ? a.token_weight[r] : 1;
      const A scale = weight * (dnll + 2 * dpenalty * a.z_weight * z) / sum, at_target = s[t];
      A* d = row_target(row, buffer.data());
      if (a.softcap > 0) {
        const A inverse = 1 / a.softcap;
#pragma omp simd
        for (int64_t v = 0; v < V; ++v) d[v] = scale * math::exp(s[v] - top) * (1 - s[v] * inverse * (s[v] * inverse));
        d[t] -= weight * dnll * (1 - at_target * inverse * (at_target * inverse));
      } else {
#pragma omp simd
        for (int64_t v = 0; v < V; ++v) d[v] = scale * math::exp(s[v] - top);
        d[t] -= weight * dnll;
      }
      store_row(row, d, V);
    }
  });
}

#define INSTANTIATE(T) template void cross_entropy_cpu<T>(const CrossEntropy<T>&);
INSTANTIATE(float) INSTANTIATE(double) INSTANTIATE(bf16) INSTANTIATE(fp16)

}  // namespace andrea::ANDREA_ISA
