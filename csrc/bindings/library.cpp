// Every op's schema, and what the kernels ask of the framework: threads, the current stream, the machine.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

#include "common.h"

STABLE_TORCH_LIBRARY(andrea_ablate, m) {
  m.def("activation(Tensor x, str kind) -> Tensor");
  m.def("activation_backward(Tensor dy, Tensor x, str kind) -> Tensor");
  m.def("gated(Tensor gate, Tensor? up, str kind) -> Tensor");
  m.def("gated_backward(Tensor dy, Tensor gate, Tensor? up, str kind) -> (Tensor dgate, Tensor dup)");
  m.def("softcap(Tensor x, float cap) -> Tensor");
  m.def("softcap_backward(Tensor dy, Tensor x, float cap) -> Tensor");
  m.def("norm(Tensor x, Tensor? gain, Tensor? bias, float eps, bool center, bool unit_offset) -> (Tensor y, Tensor mean, Tensor rstd)");
  m.def("add_norm(Tensor x, Tensor residual, Tensor? gain, Tensor? bias, float eps, bool center, bool unit_offset) -> (Tensor y, Tensor sum, Tensor mean, Tensor rstd)");
  m.def("norm_backward(Tensor dy, Tensor? dsum, Tensor s, Tensor? gain, Tensor mean, Tensor rstd, bool unit_offset) -> (Tensor dx, Tensor dgain, Tensor dbias)");
  m.def("qk_rope(Tensor q, Tensor k, Tensor? cos, Tensor? sin, Tensor? q_gain, Tensor? k_gain, float eps, bool interleaved) -> (Tensor turned_q, Tensor turned_k, Tensor q_rstd, Tensor k_rstd)");
  m.def("qk_rope_backward(Tensor dy_q, Tensor dy_k, Tensor? q, Tensor? k, Tensor? cos, Tensor? sin, Tensor? q_gain, Tensor? k_gain, Tensor q_rstd, Tensor k_rstd, bool interleaved) -> (Tensor dq, Tensor dk, Tensor dq_gain, Tensor dk_gain)");
  m.def("cross_entropy(Tensor(a!) logits, Tensor target, Tensor? token_weight, Tensor? dnll, Tensor? dpenalty, float softcap, float z_weight, bool gradient, Tensor(b!) nll, Tensor(c!) z) -> ()");
  m.def("attention(Tensor q, Tensor k, Tensor v, Tensor? slopes, Tensor? bias, Tensor? sinks, Tensor? key_mask, float scale, int window, float softcap) -> (Tensor out, Tensor lse)");
  m.def("attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? slopes, Tensor? bias, Tensor? sinks, Tensor? key_mask, float scale, int window, float softcap) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)");
}

namespace andrea {

int isa() {
  static const int found = [] {
    const int has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") ? 2
                    : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") ? 1
                                                                                                                        : 0;
    const char* limit = std::getenv("ANDREA_ABLATE_ISA");
    const int most = !limit ? 2 : !std::strcmp(limit, "scalar") ? 0 : !std::strcmp(limit, "avx2") ? 1 : 2;
    return has < most ? has : most;
  }();
  return found;
}

void parallel_for(int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context) {
  if (n > 0) TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, n, grain, body, context));
}

void* current_stream(const Tensor& x) {
  // Torch has no stable wrapper for this before 2.13, and a CPU build of torch has no such function at all.
  using Getter = AOTITorchError (*)(int32_t, void**);
  static const Getter getter = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return reinterpret_cast<Getter>(library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr);
  }();
  STD_TORCH_CHECK(getter, "andrea_ablate: this torch has no CUDA streams");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(getter(x.get_device_index(), &stream));
  return stream;
}

}  // namespace andrea
