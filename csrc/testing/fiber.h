// Runs CUDA kernels on a CPU, for tests: one fiber per thread of a block, blocks one after another in a shuffled order.
// Included by kernels/cuda.h under ANDREA_FIBER; the .cu file is then compiled by g++ as C++ (compile without
// _FORTIFY_SOURCE, which forbids jumps between stacks).
//
// What differs from a GPU is what makes errors show: after each __syncthreads the warps are put in a random order and a warp
// runs as far as it can, to its next __syncthreads or its end, before the next one starts; between two warp collectives
// the lanes run one after another in a random order. So whatever needs a barrier that is not there reads stale or
// overwritten values under some seed. Dynamic shared memory holds NaN at the start of a block and ends at a page that can't
// be touched. launch throws, naming block and thread, on: an access to protected memory; a misaligned access (compile with
// -fsanitize=alignment -fsanitize-undefined-trap-on-error); threads that wait at different barriers or leave before one;
// a shuffle among lanes that are not there; a launch that a GPU of compute capability 8.0 or later would refuse.
#pragma once
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ static  // the fibers of a block share it; as on a GPU, it holds what the block before left there
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// The vector types whose loads and stores are one instruction on a GPU, with the alignment it demands.
#define ANDREA_VECTOR(T, name, one, two, four)                                            \
  struct alignas(2 * sizeof(T)) two { T x, y; };                                          \
  struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) four { T x, y, z, w; };         \
  static inline two make_##two(T x, T y) { return {x, y}; }                               \
  static inline four make_##four(T x, T y, T z, T w) { return {x, y, z, w}; }
ANDREA_VECTOR(float, float, float1, float2, float4)
ANDREA_VECTOR(double, double, double1, double2, double4)
ANDREA_VECTOR(int, int, int1, int2, int4)
ANDREA_VECTOR(unsigned, uint, uint1, uint2, uint4)
ANDREA_VECTOR(short, short, short1, short2, short4)
ANDREA_VECTOR(unsigned short, ushort, ushort1, ushort2, ushort4)
#undef ANDREA_VECTOR

static dim3 threadIdx, blockIdx, blockDim, gridDim;  // as the running fiber sees them
constexpr int warpSize = 32;

namespace andrea::fiber {

constexpr size_t kStack = 128 << 10, kPage = 4096, kShared = 100 << 10;
enum Wait { kReady, kWarp, kBlock, kDone };

struct Fiber {
  jmp_buf at;
  ucontext_t first;
  bool started;
  Wait wait;
  dim3 thread;
  // The warp collective that it waits in: who takes part, which one, whose value it wants, and the values.
  unsigned mask;
  const char* kind;
  int source;
  alignas(16) unsigned char given[16], got[16];
};

static jmp_buf scheduler;
static Fiber* current;
static std::function<void()> job;
static std::string failure;
static uint64_t random_state = getenv("ANDREA_FIBER_SEED") ? strtoull(getenv("ANDREA_FIBER_SEED"), nullptr, 10) : 1;
static unsigned char* shared_end;
static size_t shared_bytes;

static inline uint64_t random_below(uint64_t n) {
  uint64_t z = random_state += 0x9e3779b97f4a7c15u;  // splitmix64
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (z ^ (z >> 31)) % n;
}
template <typename V> static inline void shuffle(V& values) {
  for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[random_below(i)]);
}

// The seed of the order of blocks, warps and lanes in the launches that follow.
static inline void seed(uint64_t value) { random_state = value; }

static inline std::string place(const dim3& at) {
  return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
}
[[noreturn]] static inline void fail(const std::string& what) {
  failure = what + ", in block " + place(blockIdx) + " thread " + place(current->thread);
  _longjmp(scheduler, 1);
}

static inline void pause(Wait wait) {
  current->wait = wait;
  if (_setjmp(current->at) == 0) _longjmp(scheduler, 1);
}

// A fiber lives on: after the kernel it waits for the next block.
static inline void enter() {
  for (;;) {
    job();
    pause(kDone);
  }
}

// Run one fiber until it waits or ends.
static inline void resume(Fiber& fiber) {
  current = &fiber;
  threadIdx = fiber.thread;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.at, 1);
  fiber.started = true;
  setcontext(&fiber.first);
}

// An address range of whole pages with a page on each side that can't be touched. Never freed.
static inline unsigned char* guarded(size_t bytes) {
  bytes = (bytes + kPage - 1) / kPage * kPage;
  auto* base = static_cast<unsigned char*>(
      mmap(nullptr, bytes + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (base == MAP_FAILED || mprotect(base + kPage, bytes, PROT_READ | PROT_WRITE)) throw std::bad_alloc();
  return base + kPage;
}

static inline void on_signal(int signal, siginfo_t* info, void*) {
  char text[96];
  if (signal == SIGSEGV || signal == SIGBUS)
    snprintf(text, sizeof text, "fiber: access out of bounds or misaligned, at address %p", info->si_addr);
  else
    snprintf(text, sizeof text, "fiber: misaligned access, or arithmetic without a defined result");
  fail(text);
}

// Faults of a kernel end in on_signal while this lives.
class Signals {
  static constexpr int caught[4] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
  struct sigaction before[4];
  stack_t stack_before;

 public:
  Signals() {
    static unsigned char* const stack = guarded(64 << 10);
    stack_t own = {};
    own.ss_sp = stack, own.ss_size = 64 << 10;
    sigaltstack(&own, &stack_before);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 4; ++i) sigaction(caught[i], &action, &before[i]);
  }
  ~Signals() {
    for (int i = 0; i < 4; ++i) sigaction(caught[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
  }
};

// When no lane of a warp can run: complete the collective that its lanes wait in. False when none waits in one.
static inline bool complete_collective(Fiber* lanes, int n) {
  int first = 0;
  while (first < n && lanes[first].wait != kWarp) ++first;
  if (first == n) return false;
  const unsigned mask = lanes[first].mask;
  current = &lanes[first];
  const auto wrong = [&](const std::string& what) {
    failure = "fiber: " + std::string(lanes[first].kind) + " " + what + ", in block " + place(blockIdx) + " thread " +
              place(lanes[first].thread);
    return true;
  };
  for (int i = 0; i < 32; ++i) {
    if (!(mask >> i & 1)) continue;
    const std::string lane = "lane " + std::to_string(i);
    if (i >= n) return wrong("names " + lane + " of a warp of " + std::to_string(n));
    if (lanes[i].wait == kDone) return wrong("waits for " + lane + ", which has returned");
    if (lanes[i].wait == kBlock) return wrong("waits for " + lane + ", which is in __syncthreads");
    if (lanes[i].mask != mask) return wrong("meets " + lane + " with another mask");
    if (strcmp(lanes[i].kind, lanes[first].kind)) return wrong("meets " + lane + " in " + lanes[i].kind);
    if (!(mask >> lanes[i].source & 1)) return wrong("reads from a lane outside its mask");
  }
  unsigned votes = 0;
  for (int i = 0; i < n; ++i)
    if (mask >> i & 1) {
      memcpy(lanes[i].got, lanes[lanes[i].source].given, sizeof lanes[i].got);
      votes |= unsigned(lanes[i].given[0] & 1) << i;
    }
  for (int i = 0; i < n; ++i)
    if (mask >> i & 1) {
      lanes[i].wait = kReady;
      if (!strcmp(lanes[i].kind, "__ballot_sync")) memcpy(lanes[i].got, &votes, sizeof votes);
    }
  return true;
}

// Run a warp as far as it gets without other warps.
static inline void run_warp(Fiber* lanes, int n) {
  std::vector<int> ready;
  do {
    ready.clear();
    for (int i = 0; i < n; ++i)
      if (lanes[i].wait == kReady) ready.push_back(i);
    shuffle(ready);
    for (int i : ready) {
      resume(lanes[i]);
      if (!failure.empty()) return;
    }
  } while (complete_collective(lanes, n) && failure.empty());
}

static inline void run_block(Fiber* fibers, int threads) {
  std::vector<int> warps;
  for (int t = 0; t < threads; ++t) {
    Fiber& fiber = fibers[t];
    fiber.wait = kReady;
    fiber.thread = dim3(t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y));
    if (t % 32 == 0) warps.push_back(t);
  }
  memset(shared_end - shared_bytes, 0xff, shared_bytes);
  for (;;) {
    shuffle(warps);
    for (int t : warps) {
      run_warp(&fibers[t], std::min(32, threads - t));
      if (!failure.empty()) return;
    }
    int done = 0;
    for (int t = 0; t < threads; ++t) done += fibers[t].wait == kDone;
    if (done == threads) return;
    if (done) {
      failure = "fiber: " + std::to_string(done) + " of " + std::to_string(threads) +
                " threads returned while the others wait in __syncthreads, in block " + place(blockIdx);
      return;
    }
    for (int t = 0; t < threads; ++t) fibers[t].wait = kReady;
  }
}

static inline void run_grid(dim3 grid, dim3 block, size_t bytes) {
  const auto refuse = [&](const char* what) { throw std::runtime_error(std::string("fiber: launch refused: ") + what); };
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  if (threads == 0 || threads > 1024 || block.z > 64) refuse("a block has 1 to 1024 threads");
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) refuse("the grid exceeds 2^31-1 x 65535 x 65535");
  if (bytes > 99 << 10) refuse("dynamic shared memory exceeds 99 KiB, what every GPU from compute capability 8.0 has");
  static unsigned char* const shared = guarded(kShared);
  shared_bytes = (bytes + 15) / 16 * 16;
  shared_end = shared + kShared;
  gridDim = grid, blockDim = block;
  std::vector<uint64_t> order(uint64_t(grid.x) * grid.y * grid.z);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  shuffle(order);
  static Fiber fibers[1024];
  static uint64_t prepared = 0;
  for (; prepared < threads; ++prepared) {
    Fiber& fiber = fibers[prepared];
    if (!fiber.first.uc_stack.ss_sp) {
      getcontext(&fiber.first);
      fiber.first.uc_stack.ss_sp = guarded(kStack);
      fiber.first.uc_stack.ss_size = kStack;
      fiber.first.uc_link = nullptr;
    }
    makecontext(&fiber.first, enter, 0);
    fiber.started = false;
  }
  failure.clear();
  const Signals signals;
  for (uint64_t i : order) {
    blockIdx = dim3(unsigned(i % grid.x), unsigned(i / grid.x % grid.y), unsigned(i / grid.x / grid.y));
    run_block(fibers, int(threads));
    if (failure.empty()) continue;
    prepared = 0;  // fibers that are left in the middle of a kernel start anew
    throw std::runtime_error(failure);
  }
}

// A warp collective: wait for the lanes of `mask`, return what lane `source` of this warp gave.
template <typename T> static inline T collective(const char* kind, unsigned mask, int source, T value) {
  static_assert(sizeof(T) <= 16 && std::is_trivially_copyable_v<T>);
  const unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  if (!(mask >> (t % 32) & 1)) fail(std::string("fiber: ") + kind + " with a mask that leaves out the calling lane");
  Fiber& own = *current;
  own.mask = mask, own.kind = kind, own.source = source < 0 ? int(t % 32) : source;
  memcpy(own.given, &value, sizeof value);
  pause(kWarp);
  memcpy(&value, own.got, sizeof value);
  return value;
}
static inline int lane() { return int((threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32); }
// The source lane within groups of `width` lanes; beyond the group a lane gets its own value.
static inline int within(int source, int width) { return source / width == lane() / width && source >= 0 ? source : lane(); }

}  // namespace andrea::fiber

static inline void __syncthreads() { andrea::fiber::pause(andrea::fiber::kBlock); }
static inline void __syncwarp(unsigned mask = ~0u) { andrea::fiber::collective("__syncwarp", mask, -1, 0); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
template <typename T> static inline T __shfl_sync(unsigned mask, T v, int source, int width = 32) {
  return andrea::fiber::collective("__shfl_sync", mask, andrea::fiber::lane() / width * width + source % width, v);
}
template <typename T> static inline T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32) {
  return andrea::fiber::collective("__shfl_xor_sync", mask, andrea::fiber::within(andrea::fiber::lane() ^ bits, width), v);
}
template <typename T> static inline T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32) {
  return andrea::fiber::collective("__shfl_down_sync", mask, andrea::fiber::within(andrea::fiber::lane() + int(by), width), v);
}
template <typename T> static inline T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32) {
  return andrea::fiber::collective("__shfl_up_sync", mask, andrea::fiber::within(andrea::fiber::lane() - int(by), width), v);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return andrea::fiber::collective("__ballot_sync", mask, -1, unsigned(predicate != 0));
}
static inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
static inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }

// In the kernels' own namespace, because the C library declares functions of these names.
namespace andrea {
static inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
static inline double rsqrt(double v) { return 1.0 / std::sqrt(v); }
static inline float __expf(float v) { return std::exp(v); }
static inline float __exp2f(float v) { return std::exp2(v); }
static inline float __logf(float v) { return std::log(v); }
static inline float __log2f(float v) { return std::log2(v); }
static inline float __sinf(float v) { return std::sin(v); }
static inline float __cosf(float v) { return std::cos(v); }
static inline float __powf(float a, float b) { return std::pow(a, b); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __frcp_rn(float v) { return 1.0f / v; }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
template <typename T> static inline T __ldg(const T* at) { return *at; }
template <typename T> static inline T __ldcs(const T* at) { return *at; }
template <typename T> static inline void __stcs(T* at, T v) { *at = v; }
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }
static inline unsigned __float_as_uint(float v) { unsigned u; memcpy(&u, &v, 4); return u; }
static inline float __uint_as_float(unsigned u) { float v; memcpy(&v, &u, 4); return v; }
static inline int __float_as_int(float v) { return int(__float_as_uint(v)); }
static inline float __int_as_float(int u) { return __uint_as_float(unsigned(u)); }
template <typename T> static inline T atomicAdd(T* at, T v) {
  static_assert(std::is_integral_v<T>, "the order of float atomics is not fixed, so their sum is not either");
  const T before = *at;
  *at += v;
  return before;
}
using std::max;
using std::min;
}  // namespace andrea

// Dynamic shared memory: `T* name` over the bytes that launch was given.
#define ANDREA_DYNAMIC_SHARED(T, name) \
  T* const name = reinterpret_cast<T*>(andrea::fiber::shared_end - andrea::fiber::shared_bytes)

namespace andrea {

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, void*, Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  fiber::job = [=] { kernel(arguments...); };
  fiber::run_grid(grid, block, shared_bytes);
}

}  // namespace andrea
