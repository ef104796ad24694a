#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <utility>

#include "math.h"

// Each task is one query head of one sequence. Its operands are packed once into aligned scratch, as rows and, where the
// product runs over d_head, also as panels of kPanel keys side by side; every product is then made of register tiles of
// kRows x kPanel. Scores exist for kQueries x ld at a time. A tile that no query sees is skipped, so that the cost of a
// causal mask is half the rectangle, and only tiles on its edge are masked.
namespace andrea::ANDREA_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64, kRows = 12;
constexpr int64_t kQueries = 48, kForwardKeys = 192, kBackwardKeys = 96, kPadding = 96;
#elif defined(__AVX2__)
constexpr int kBytes = 32, kRows = 6;
constexpr int64_t kQueries = 48, kForwardKeys = 192, kBackwardKeys = 96, kPadding = 48;
#else
constexpr int kBytes = 16, kRows = 6;
constexpr int64_t kQueries = 48, kForwardKeys = 192, kBackwardKeys = 96, kPadding = 48;
#endif
// A block of keys, padded or not, is a whole number of panels and of register tiles.
static_assert(kQueries % kRows == 0 && kPadding % kRows == 0 && kPadding % (kBytes / 2) == 0 && kForwardKeys % kPadding == 0 && kBackwardKeys % kPadding == 0);

template <typename A> struct VectorOf { typedef A type __attribute__((vector_size(kBytes))); };
template <typename A> using Vector = typename VectorOf<A>::type;
template <typename A> constexpr int kWidth = kBytes / sizeof(A);
template <typename A> constexpr int kPanel = 2 * kWidth<A>;
template <typename A> using Index = std::conditional_t<std::is_same_v<A, double>, int64_t, int32_t>;  // as wide as A
template <typename A> constexpr A kNever = -std::numeric_limits<A>::infinity();

ANDREA_INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

template <typename A> ANDREA_INLINE Vector<A> load(const A* p) {
  Vector<A> v;
  memcpy(&v, p, sizeof(v));
  return v;
}
template <typename A> ANDREA_INLINE void store(A* p, Vector<A> v) { memcpy(p, &v, sizeof(v)); }

// c[i][n] (+)= sum_k a[i * row + k * step] * b[k * ldb + n] for kRows rows and V vectors of columns.
template <int V, bool add, typename A>
ANDREA_INLINE void tile_product(A* c, int64_t ldc, const A* a, int64_t row, int64_t step, const A* b, int64_t ldb, int64_t depth) {
  constexpr int W = kWidth<A>;
  Vector<A> sum[kRows][V] = {};
  for (int64_t k = 0; k < depth; ++k, a += step, b += ldb) {
    Vector<A> right[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) right[v] = load(b + v * W);
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sum[i][v] += a[i * row] * right[v];
  }
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store(c + i * ldc + v * W, add ? load(c + i * ldc + v * W) + sum[i][v] : sum[i][v]);
}

// A panel of products over d_head, summed in pieces of 64: a longer sum rounds more than torch's does.
template <typename A> ANDREA_INLINE void score_tile(A* c, int64_t ldc, const A* rows, int64_t width, const A* panel, int64_t depth) {
  constexpr int64_t kPiece = 64;
  tile_product<2, false>(c, ldc, rows, width, 1, panel, kPanel<A>, std::min(depth, kPiece));
  for (int64_t k = kPiece; k < depth; k += kPiece)
    tile_product<2, true>(c, ldc, rows + k, width, 1, panel + k * kPanel<A>, kPanel<A>, std::min(depth - k, kPiece));
}

// tile_product for `width` columns, a multiple of the vector width.
template <bool add, typename A>
ANDREA_INLINE void row_product(A* c, const A* a, int64_t row, int64_t step, const A* b, int64_t depth, int64_t width) {
  int64_t n = 0;
  for (; n + kPanel<A> <= width; n += kPanel<A>) tile_product<2, add>(c + n, width, a, row, step, b + n, width, depth);
  if (n < width) tile_product<1, add>(c + n, width, a, row, step, b + n, width, depth);
}

// Rows of K elements, `stride` apart, as rows of `width` >= K elements times `factor`; rows up to `padded` are zero.
template <typename T, typename A = acc_t<T>>
void pack_rows(A* to, const T* x, int64_t stride, int64_t rows, int64_t padded, int64_t K, int64_t width, A factor) {
  constexpr int W = kWidth<A>;
  for (int64_t r = 0; r < rows; ++r) {
    A* row = to + r * width;
    const A* from = load_row(x + r * stride, row, K);
    int64_t d = 0;
    for (; d + W <= K; d += W) store(row + d, load(from + d) * factor);
    if (d < width) {
      Vector<A> rest = {};
      for (int64_t e = d; e < K; ++e) rest[e - d] = from[e] * factor;
      store(row + d, rest);
    }
  }
  std::fill(to + rows * width, to + padded * width, A(0));
}

template <int distance, typename A, size_t... lane>
ANDREA_INLINE void exchange(Vector<A>& a, Vector<A>& b, std::index_sequence<lane...>) {
  constexpr int W = kWidth<A>;
  const Vector<A> first = __builtin_shufflevector(a, b, (lane & distance ? W + lane - distance : lane)...);
  b = __builtin_shufflevector(a, b, (lane & distance ? W + lane : lane + distance)...);
  a = first;
}
template <int distance, typename A> ANDREA_INLINE void transpose(Vector<A> (&block)[kWidth<A>]) {
#pragma GCC unroll 16
  for (int i = 0; i < kWidth<A>; ++i)
    if (!(i & distance)) exchange<distance, A>(block[i], block[i + distance], std::make_index_sequence<kWidth<A>>());
  if constexpr (distance > 1) transpose<distance / 2, A>(block);
}

// Packed rows as panels: panel p holds column d of its kPanel rows side by side at p * width * kPanel + d * kPanel.
template <typename A> void pack_panels(A* to, const A* rows, int64_t count, int64_t width) {
  constexpr int W = kWidth<A>, N = kPanel<A>;
  for (int64_t r = 0; r < count; r += W)
    for (int64_t d = 0; d < width; d += W) {
      Vector<A> block[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) block[i] = load(rows + (r + i) * width + d);
      transpose<W / 2, A>(block);
      A* panel = to + r / N * N * width + d * N + r % N;
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) store(panel + i * N, block[i]);
    }
}

template <typename A, int distance, size_t... lane> ANDREA_INLINE Vector<A> rotated(Vector<A> v, std::index_sequence<lane...>) {
  return __builtin_shufflevector(v, v, (lane ^ distance)...);
}
template <typename A, int distance = kWidth<A> / 2, typename Combine> ANDREA_INLINE A reduced(Vector<A> v, const Combine& combine) {
  if constexpr (distance == 0) return v[0];
  else return reduced<A, distance / 2>(combine(v, rotated<A, distance>(v, std::make_index_sequence<kWidth<A>>())), combine);
}

// Aligned scratch that is handed out piece by piece.
template <typename A> struct Scratch {
  A* next;
  std::unique_ptr<A, void (*)(void*)> memory;
  explicit Scratch(int64_t elements) : next(nullptr), memory(nullptr, std::free) {
    memory.reset(static_cast<A*>(std::aligned_alloc(64, round_up((elements + 1) * sizeof(A), 64))));
    next = memory.get();
    if (!next) throw std::bad_alloc();
  }
  A* take(int64_t elements) {
    A* piece = next;
    next += round_up(elements, 64 / sizeof(A));
    return piece;
  }
};

// The sizes that both directions pack to, and what turns scores into logits.
template <typename T> struct Head {
  using A = acc_t<T>;
  const AttentionInputs<T>& in;
  int64_t width, rows, keys, first, origin;  // padded K, L and M; position of query 0; table[j - i + origin] is for i - j
  bool plain;
  A *table, *allowed;  // by distance, by key; null without
  A cap, inverse_cap;

  explicit Head(const AttentionInputs<T>& in)
      : in(in), width(round_up(in.K, kWidth<A>)), rows(round_up(in.L, kQueries)), keys(round_up(in.M, kPadding)), first(in.M - in.L),
        origin(first + rows), plain(!in.slopes && !in.bias && !in.key_mask && in.softcap == 0), table(nullptr), allowed(nullptr),
        cap(in.softcap), inverse_cap(in.softcap == 0 ? 0 : 1 / in.softcap) {}

  int64_t table_size() const { return origin + keys; }
  int64_t low(int64_t i) const { return in.window && i >= in.window ? i - in.window + 1 : 0; }
  int64_t high(int64_t i) const { return std::min(i + 1, in.M); }

  int64_t scratch_size() const { return plain ? 0 : table_size() + keys + 32; }
  void reserve(Scratch<A>& scratch) {
    if (in.slopes || in.bias) table = scratch.take(table_size());
    if (in.key_mask) allowed = scratch.take(keys);
  }
  void select(int64_t b, int64_t h) {
    if (table)
      for (int64_t x = 0; x < table_size(); ++x) {
        const int64_t distance = std::max<int64_t>(origin - x, 0);
        table[x] = (in.bias ? in.bias[h * in.R + std::min(distance, in.R - 1)] : 0) - (in.slopes ? in.slopes[h] * A(distance) : 0);
      }
    if (allowed)
      for (int64_t j = 0; j < keys; ++j) allowed[j] = j < in.M && in.key_mask[b * in.M + j] ? 0 : kNever<A>;
  }

  // Scaled scores of the queries at positions i.. and the keys j.. become logits, -inf where a query may not look.
  // slope, if not null, receives the derivative of the soft-cap.
  static inline __attribute__((always_inline)) void mask_row(A* s, Index<A> from, Index<A> to) {
#pragma omp simd
    for (Index<A> c = 0; c < kPanel<A>; ++c) s[c] = (c >= from) & (c < to) ? s[c] : kNever<A>;
  }
  inline __attribute__((always_inline)) void logits(A* s, int64_t ld, int64_t i, int64_t j, A* slope) const {
    constexpr int N = kPanel<A>;
    if (!plain)
      for (int r = 0; r < kRows; ++r) {
        A* row = s + r * ld;
        if (cap != 0 && slope) {
#pragma omp simd
          for (int c = 0; c < N; ++c) {
            const A t = math::tanh(row[c] * inverse_cap);
            row[c] = cap * t, slope[r * N + c] = 1 - t * t;
          }
        } else if (cap != 0) {
#pragma omp simd
          for (int c = 0; c < N; ++c) row[c] = cap * math::tanh(row[c] * inverse_cap);
        }
        if (table) {
          const A* bias = table + (j - i - r + origin);
#pragma omp simd
          for (int c = 0; c < N; ++c) row[c] += bias[c];
        }
        if (allowed) {
#pragma omp simd
          for (int c = 0; c < N; ++c) row[c] += allowed[j + c];
        }
      }
    if (j < low(i + kRows - 1) || j + N > high(i))
      for (int r = 0; r < kRows; ++r) mask_row(s + r * ld, std::max<int64_t>(low(i + r) - j, 0), std::min<int64_t>(high(i + r) - j, N));
  }
};

// The panels beside those of a tile that a product over kRows keys may reach into.
template <typename A> ANDREA_INLINE void clear_beside(A* strip, int64_t ld, int64_t from, int64_t to) {
  constexpr int64_t reach = (kRows + kPanel<A> - 1) / kPanel<A> * kPanel<A>;
  for (int r = 0; r < kRows; ++r, strip += ld) {
    for (int64_t c = std::max<int64_t>(from - reach, 0); c < from; ++c) strip[c] = 0;
    for (int64_t c = to; c < std::min(to + reach, ld); ++c) strip[c] = 0;
  }
}

template <typename T> struct ForwardTask {
  using A = acc_t<T>;
  static constexpr int N = kPanel<A>, W = kWidth<A>;
  static constexpr int64_t kKeys = kForwardKeys;
  const AttentionForward<T>& a;
  const AttentionInputs<T>& in;
  Head<T> head;
  Scratch<A> scratch;
  A *q, *k, *v, *out, *strip, *most, *total;
  int64_t packed = -1;

  explicit ForwardTask(const AttentionForward<T>& a)
      : a(a), in(a.in), head(a.in),
        scratch((head.rows + 3 * head.keys + kQueries) * head.width + kRows * kKeys + 2 * kQueries + head.scratch_size() + 512) {
    q = scratch.take(head.rows * head.width), k = scratch.take(head.keys * head.width), v = scratch.take(head.keys * head.width);
    out = scratch.take(kQueries * head.width), strip = scratch.take(kRows * kKeys);
    most = scratch.take(kQueries), total = scratch.take(kQueries);
    head.reserve(scratch);
  }

  void run(int64_t b, int64_t h) {
    const int64_t width = head.width, g = h / (in.H / in.G), kv = b * in.G + g;
    pack_rows(q, in.q + b * in.q_stride.batch + h * in.q_stride.head, in.q_stride.position, in.L, head.rows, in.K, width, in.scale);
    if (kv != packed) {
      A* rows = scratch.next;  // the room left is that of the keys
      pack_rows(rows, in.k + b * in.k_stride.batch + g * in.k_stride.head, in.k_stride.position, in.M, head.keys, in.K, width, A(1));
      pack_panels(k, rows, head.keys, width);
      pack_rows(v, in.v + b * in.v_stride.batch + g * in.v_stride.head, in.v_stride.position, in.M, head.keys, in.K, width, A(1));
      packed = kv;
    }
    head.select(b, h);
    for (int64_t l = 0; l < in.L; l += kQueries) {
      const int64_t rows = std::min(kQueries, in.L - l), i = head.first + l;
      std::fill(most, most + kQueries, in.sinks ? in.sinks[h] : kNever<A>);
      std::fill(total, total + kQueries, in.sinks ? A(1) : A(0));
      for (int64_t j = head.low(i) / kKeys * kKeys; j < head.high(i + rows - 1); j += kKeys)
        for (int64_t r = 0; r < rows; r += kRows) attend(q + (l + r) * width, i + r, j, r);
      for (int64_t r = 0; r < rows; ++r) finish(b, l + r, h, r);
    }
  }

  inline __attribute__((always_inline)) void attend(const A* queries, int64_t i, int64_t block, int64_t at) {
    const int64_t low = head.low(i), high = head.high(i + kRows - 1), width = head.width;
    const int64_t from = std::max(low, block) - block, to = std::min(high, block + kKeys) - block;
    if (from >= to) return;
    const int64_t begin = from / N * N;
    Vector<A> peak[kRows];
    for (int r = 0; r < kRows; ++r) peak[r] = Vector<A>{} + kNever<A>;
    for (int64_t c = begin; c < to; c += N) {
      A* s = strip + c;
      score_tile(s, kKeys, queries, width, k + (block + c) * width, in.K);
      head.logits(s, kKeys, i, block + c, nullptr);
      for (int r = 0; r < kRows; ++r)
        for (int n = 0; n < N; n += W) {
          const Vector<A> x = load(s + r * kKeys + n);
          peak[r] = peak[r] > x ? peak[r] : x;
        }
    }
    for (int r = 0; r < kRows; ++r) {
      const A before = most[at + r], now = std::max(before, reduced<A>(peak[r], [](auto x, auto y) { return x > y ? x : y; }));
      const A shift = now == kNever<A> ? 0 : now, kept = math::exp_decay(before - shift);
      A* s = strip + r * kKeys;
      Vector<A> sum = {};
      for (int64_t c = begin; c < to; c += N) {
#pragma omp simd
        for (int n = 0; n < N; ++n) s[c + n] = math::exp_decay(s[c + n] - shift);
        for (int n = 0; n < N; n += W) sum += load(s + c + n);
      }
      most[at + r] = now;
      total[at + r] = total[at + r] * kept + reduced<A>(sum, [](auto x, auto y) { return x + y; });
      if (low < block && kept != 1) {
        A* o = out + (at + r) * width;
#pragma omp simd
        for (int64_t d = 0; d < width; ++d) o[d] *= kept;
      }
    }
    if (low < block) row_product<true>(out + at * width, strip + from, kKeys, 1, v + (block + from) * width, to - from, width);
    else row_product<false>(out + at * width, strip + from, kKeys, 1, v + (block + from) * width, to - from, width);
  }

  void finish(int64_t b, int64_t l, int64_t h, int64_t r) {
    T* y = a.out + ((b * in.L + l) * in.H + h) * in.K;
    A* o = out + r * head.width;
    const A factor = total[r] == 0 ? 0 : 1 / total[r];
    A* target = row_target(y, o);
#pragma omp simd
    for (int64_t d = 0; d < in.K; ++d) target[d] = o[d] * factor;
    store_row(y, o, in.K);
    a.lse[(b * in.H + h) * in.L + l] = most[r] + std::log(total[r]);
  }
};

template <typename T> struct BackwardTask {
  using A = acc_t<T>;
  static constexpr int N = kPanel<A>, W = kWidth<A>;
  static constexpr int64_t kKeys = kBackwardKeys;
  const AttentionBackward<T>& a;
  const AttentionInputs<T>& in;
  Head<T> head;
  Scratch<A> scratch;
  A *q, *dout, *k, *k_panels, *v_panels, *dk, *dv, *dq, *p, *ds, *lse, *delta, *dlse, *dtable = nullptr;
  int64_t packed = -1;

  explicit BackwardTask(const AttentionBackward<T>& a)
      : a(a), in(a.in), head(a.in),
        scratch((2 * head.rows + 5 * head.keys + kQueries) * head.width + 2 * kQueries * kKeys + 3 * head.rows + head.scratch_size() +
                (a.dbias ? head.table_size() : 0) + 1024) {
    const int64_t rows = head.rows * head.width, keys = head.keys * head.width;
    q = scratch.take(rows), dout = scratch.take(rows), k = scratch.take(keys), k_panels = scratch.take(keys);
    v_panels = scratch.take(keys), dk = scratch.take(keys), dv = scratch.take(keys), dq = scratch.take(kQueries * head.width);
    p = scratch.take(kQueries * kKeys), ds = scratch.take(kQueries * kKeys);
    lse = scratch.take(head.rows), delta = scratch.take(head.rows), dlse = scratch.take(head.rows);
    head.reserve(scratch);
    if (a.dbias) dtable = scratch.take(head.table_size());
  }

  void run(int64_t b, int64_t h) {
    const int64_t width = head.width, group = in.H / in.G, g = h / group, kv = b * in.G + g;
    pack_rows(q, in.q + b * in.q_stride.batch + h * in.q_stride.head, in.q_stride.position, in.L, head.rows, in.K, width, in.scale);
    pack_rows(dout, a.dout + b * a.dout_stride.batch + h * a.dout_stride.head, a.dout_stride.position, in.L, head.rows, in.K, width, A(1));
    if (kv != packed) {
      A* rows = dv;  // cleared below
      pack_rows(rows, in.v + b * in.v_stride.batch + g * in.v_stride.head, in.v_stride.position, in.M, head.keys, in.K, width, A(1));
      pack_panels(v_panels, rows, head.keys, width);
      pack_rows(k, in.k + b * in.k_stride.batch + g * in.k_stride.head, in.k_stride.position, in.M, head.keys, in.K, width, A(1));
      pack_panels(k_panels, k, head.keys, width);
      packed = kv;
    }
    head.select(b, h);
    std::fill(dk, dk + head.keys * width, A(0));
    std::fill(dv, dv + head.keys * width, A(0));
    if (dtable) std::fill(dtable, dtable + head.table_size(), A(0));
    statistics(b, h);
    for (int64_t l = 0; l < in.L; l += kQueries) {
      const int64_t rows = std::min(kQueries, in.L - l), i = head.first + l;
      for (int64_t j = head.low(i) / kKeys * kKeys; j < head.high(i + rows - 1); j += kKeys) {
        for (int64_t r = 0; r < rows; r += kRows) tile(l, r, j);
        const int64_t last = std::min(head.high(i + rows - 1), j + kKeys);
        for (int64_t c = std::max(head.low(i), j) - j; c < last - j;) {
          c = c / kRows * kRows;
          // The rows that see one of the keys j + c .. j + c + kRows - 1.
          const int64_t begin = std::max<int64_t>(j + c - i, 0), end = in.window ? std::min(rows, j + c + kRows - 1 + in.window - i) : rows;
          if (begin < end) {
            const A *x = dout + (l + begin) * width, *y = q + (l + begin) * width;
            row_product<true>(dv + (j + c) * width, p + begin * kKeys + c, 1, kKeys, x, end - begin, width);
            row_product<true>(dk + (j + c) * width, ds + begin * kKeys + c, 1, kKeys, y, end - begin, width);
          }
          c += kRows;
        }
      }
      for (int64_t r = 0; r < rows; ++r) write(a.dq + ((b * in.L + l + r) * in.H + h) * in.K, dq + r * width, in.scale);
    }
    if (a.head_dkv) {
      A *to_k = a.head_dkv + (b * in.H + h) * in.M * in.K, *to_v = to_k + in.B * in.H * in.M * in.K;
      for (int64_t j = 0; j < in.M; ++j) {
        std::copy(dk + j * width, dk + j * width + in.K, to_k + j * in.K);
        std::copy(dv + j * width, dv + j * width + in.K, to_v + j * in.K);
      }
    } else {
      for (int64_t j = 0; j < in.M; ++j) {
        write(a.dk + ((b * in.M + j) * in.G + g) * in.K, dk + j * width, A(1));
        write(a.dv + ((b * in.M + j) * in.G + g) * in.K, dv + j * width, A(1));
      }
    }
    if (dtable) {
      A* to = a.batch_dbias + (b * in.H + h) * in.R;
      std::fill(to, to + in.R, A(0));
      for (int64_t distance = 0; distance < std::min(in.M, head.origin + 1); ++distance)
        to[std::min(distance, in.R - 1)] += dtable[head.origin - distance];
    }
  }

  void write(T* to, A* from, A factor) {
    A* target = row_target(to, from);
#pragma omp simd
    for (int64_t d = 0; d < in.K; ++d) target[d] = from[d] * factor;
    store_row(to, from, in.K);
  }

  void statistics(int64_t b, int64_t h) {
    const int64_t at = (b * in.H + h) * in.L;
    double dsink = 0;
    for (int64_t l = 0; l < head.rows; ++l) {
      // A row without a key, or beyond the last, has weights exp(-inf) = 0.
      if (l >= in.L || a.lse[at + l] == kNever<A>) {
        lse[l] = -kNever<A>, delta[l] = dlse[l] = 0;
        continue;
      }
      const A *y = load_row(a.out + ((b * in.L + l) * in.H + h) * in.K, dq, in.K), *x = dout + l * head.width;
      A sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t d = 0; d < in.K; ++d) sum += x[d] * y[d];
      lse[l] = a.lse[at + l], dlse[l] = a.dlse ? a.dlse[at + l] : 0, delta[l] = sum - dlse[l];
      if (a.batch_dsinks) dsink -= double(math::exp_decay(in.sinks[h] - lse[l])) * delta[l];
    }
    if (a.batch_dsinks) a.batch_dsinks[b * in.H + h] = A(dsink);
  }

  inline __attribute__((always_inline)) void tile(int64_t l, int64_t at, int64_t block) {
    const int64_t i = head.first + l + at, low = head.low(i), high = head.high(i + kRows - 1), width = head.width;
    const int64_t from = std::max(low, block) - block, to = std::min(high, block + kKeys) - block;
    A *p_strip = p + at * kKeys, *ds_strip = ds + at * kKeys;
    if (from >= to) return;
    // Where these queries see no other block, delta is the sum over their weights: what rounds dp then cancels, and the
    // gradient of a query that sees one key is 0.
    const bool whole = low >= block && high <= block + kKeys;
    const int64_t begin = from / N * N;
    const A *queries = q + (l + at) * width, *gradients = dout + (l + at) * width, *log_sum = lse + l + at;
    A *product = delta + l + at, slopes[kRows * kKeys];
    const auto finish = [&](int64_t c, const A* slope) {
      const A* s = p_strip + c;
      A* d = ds_strip + c;
      for (int r = 0; r < kRows; ++r) {
        const A less = product[r];
#pragma omp simd
        for (int n = 0; n < N; ++n) d[r * kKeys + n] = s[r * kKeys + n] * (d[r * kKeys + n] - less);
      }
      if (dtable)
        for (int r = 0; r < kRows; ++r) {
          A* sum = dtable + (block + c - i - r + head.origin);
#pragma omp simd
          for (int n = 0; n < N; ++n) sum[n] += d[r * kKeys + n];
        }
      if (head.cap != 0)
        for (int r = 0; r < kRows; ++r) {
#pragma omp simd
          for (int n = 0; n < N; ++n) d[r * kKeys + n] *= slope[r * N + n];
        }
    };
    Vector<A> sums[kRows] = {};
    int64_t c = begin;
    for (; c < to; c += N) {
      A *s = p_strip + c, *d = ds_strip + c, *slope = slopes + c * kRows;
      score_tile(s, kKeys, queries, width, k_panels + (block + c) * width, in.K);
      score_tile(d, kKeys, gradients, width, v_panels + (block + c) * width, in.K);
      head.logits(s, kKeys, i, block + c, slope);
      for (int r = 0; r < kRows; ++r) {
        const A shift = log_sum[r];
#pragma omp simd
        for (int n = 0; n < N; ++n) s[r * kKeys + n] = math::exp_decay(s[r * kKeys + n] - shift);
        if (whole)
          for (int n = 0; n < N; n += W) sums[r] += load(s + r * kKeys + n) * load(d + r * kKeys + n);
      }
      if (!whole) finish(c, slope);
    }
    if (whole) {
      for (int r = 0; r < kRows; ++r) product[r] = reduced<A>(sums[r], [](auto x, auto y) { return x + y; }) - dlse[l + at + r];
      for (int64_t done = begin; done < c; done += N) finish(done, slopes + done * kRows);
    }
    clear_beside(p_strip, kKeys, begin, c);
    clear_beside(ds_strip, kKeys, begin, c);
    if (low < block) row_product<true>(dq + at * width, ds_strip + from, kKeys, 1, k + (block + from) * width, to - from, width);
    else row_product<false>(dq + at * width, ds_strip + from, kKeys, 1, k + (block + from) * width, to - from, width);
  }
};

}  // namespace

template <typename T> void attention_forward_cpu(const AttentionForward<T>& a) {
  if (a.in.L == 0 || a.in.K == 0) return;
  parallel(a.in.B * a.in.H, 1, [&](int64_t begin, int64_t end) {
    ForwardTask<T> task(a);
    for (int64_t n = begin; n < end; ++n) task.run(n / a.in.H, n % a.in.H);
  });
}

template <typename T> void attention_backward_cpu(const AttentionBackward<T>& a) {
  using A = acc_t<T>;
  const AttentionInputs<T>& in = a.in;
  const int64_t group = in.G ? in.H / in.G : 1;
  parallel(in.B * in.H, 1, [&](int64_t begin, int64_t end) {
    BackwardTask<T> task(a);
    for (int64_t n = begin; n < end; ++n) task.run(n / in.H, n % in.H);
  });
  if (a.head_dkv)
    parallel(in.B * in.G, 1, [&](int64_t begin, int64_t end) {
      Scratch<A> scratch(in.K);
      for (int64_t n = begin; n < end; ++n)
        for (int64_t j = 0; j < in.M; ++j)
          for (int which = 0; which < 2; ++which) {
            const A* from = a.head_dkv + ((which * in.B * in.G + n) * group * in.M + j) * in.K;
            T* to = (which ? a.dv : a.dk) + ((n / in.G * in.M + j) * in.G + n % in.G) * in.K;
            std::copy(from, from + in.K, scratch.next);
            for (int64_t member = 1; member < group; ++member) {
              from += in.M * in.K;
#pragma omp simd
              for (int64_t d = 0; d < in.K; ++d) scratch.next[d] += from[d];
            }
            if constexpr (std::is_same_v<T, A>) std::copy(scratch.next, scratch.next + in.K, to);
            else store_row(to, scratch.next, in.K);
          }
    });
  const auto over_batches = [&](A* to, const A* from, int64_t n) {
    for (int64_t x = 0; to && x < n; ++x) {
      to[x] = 0;
      for (int64_t b = 0; b < in.B; ++b) to[x] += from[b * n + x];
    }
  };
  over_batches(a.dbias, a.batch_dbias, in.H * in.R);
  over_batches(a.dsinks, a.batch_dsinks, in.H);
}

#define INSTANTIATE(T)                                                 \
  template void attention_forward_cpu<T>(const AttentionForward<T>&); \
  template void attention_backward_cpu<T>(const AttentionBackward<T>&);
INSTANTIATE(float) INSTANTIATE(double) INSTANTIATE(bf16) INSTANTIATE(fp16)

}  // namespace andrea::ANDREA_ISA
