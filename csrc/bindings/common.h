// What every binding needs: checks that name op, argument, expected and actual; dispatch on dtype, device and machine.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <string>
#include <tuple>

#include "../kernels/cpu.h"

namespace andrea {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Whether an op on x runs CUDA kernels; in the library for tests (ANDREA_FIBER) it does so on a CPU.
inline bool on_gpu([[maybe_unused]] const Tensor& x) {
#if defined(ANDREA_FIBER)
  return true;
#elif defined(ANDREA_CUDA)
  return x.is_cuda();
#else
  return false;
#endif
}

// The current CUDA stream of the tensor's device.
void* current_stream(const Tensor& x);

// Run KERNEL_cpu(arguments) or KERNEL_cuda(arguments, stream), whichever the device of x asks for.
#if defined(ANDREA_FIBER)
#define ANDREA_RUN(x, kernel, arguments) kernel##_cuda(arguments, nullptr)
#elif defined(ANDREA_CUDA)
#define ANDREA_RUN(x, kernel, arguments)                                                  \
  do {                                                                                    \
    if (andrea::on_gpu(x)) {                                                              \
      const torch::stable::accelerator::DeviceGuard andrea_guard((x).get_device_index()); \
      kernel##_cuda(arguments, andrea::current_stream(x));                                \
    } else {                                                                              \
      ANDREA_CPU(kernel##_cpu, arguments);                                                \
    }                                                                                     \
  } while (false)
#else
#define ANDREA_RUN(x, kernel, arguments) ANDREA_CPU(kernel##_cpu, arguments)
#endif

// Register KERNELS(m), the m.impl lines of a binding, for each device this library has.
#if defined(ANDREA_CUDA)
#define ANDREA_REGISTER(KERNELS)                               \
  STABLE_TORCH_LIBRARY_IMPL(andrea_ablate, CPU, m) { KERNELS(m) } \
  STABLE_TORCH_LIBRARY_IMPL(andrea_ablate, CUDA, m) { KERNELS(m) }
#else
#define ANDREA_REGISTER(KERNELS) STABLE_TORCH_LIBRARY_IMPL(andrea_ablate, CPU, m) { KERNELS(m) }
#endif

inline std::string shape_of(const Tensor& x) {
  std::string text = "(";
  for (int64_t i = 0; i < x.dim(); ++i) text += (i ? ", " : "") + std::to_string(x.size(i));
  return text + ")";
}

// Call body with a null pointer of the kernels' element type.
template <typename Body> void dispatch(const char* op, const Tensor& x, const Body& body) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return body(static_cast<float*>(nullptr));
    case ScalarType::Double: return body(static_cast<double*>(nullptr));
    case ScalarType::BFloat16: return body(static_cast<bf16*>(nullptr));
    case ScalarType::Half: return body(static_cast<fp16*>(nullptr));
    default: STD_TORCH_CHECK(false, op, ": dtype ", int(x.scalar_type()), " of the input is not one of float32, float64, bfloat16, float16");
  }
}

inline ScalarType acc_dtype(const Tensor& x) { return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float; }

inline Tensor packed(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

template <typename T> T* data(const Tensor& x) { return static_cast<T*>(x.data_ptr()); }
template <typename T> T* data(const MaybeTensor& x) { return x ? static_cast<T*>(x->data_ptr()) : nullptr; }

// A parameter of shape (n,) as the accumulation type of x, and beside it.
inline MaybeTensor vector_of(const char* op, const char* name, const MaybeTensor& v, int64_t n, const Tensor& x) {
  if (!v) return v;
  STD_TORCH_CHECK(v->dim() == 1 && v->size(0) == n, op, ": ", name, " has shape ", shape_of(*v), ", expected (", n, ")");
  STD_TORCH_CHECK(v->device() == x.device(), op, ": ", name, " and x are on different devices; expected the same");
  const ScalarType dtype = acc_dtype(x);
  return packed(v->scalar_type() == dtype ? *v : torch::stable::to(*v, dtype));
}

inline void check_same(const char* op, const char* name, const Tensor& t, const Tensor& x) {
  bool same = t.dim() == x.dim() && t.scalar_type() == x.scalar_type() && t.device() == x.device();
  for (int64_t i = 0; same && i < x.dim(); ++i) same = t.size(i) == x.size(i);
  STD_TORCH_CHECK(same, op, ": ", name, " has shape ", shape_of(t), " and x ", shape_of(x), "; expected the same shape, dtype and device");
}

}  // namespace andrea
