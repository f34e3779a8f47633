// Linear layers for few and for many rows. Weights are packed into panels of outputs, so that
// they are read once, in a line, at the speed of the memory; the sums of a small block are in
// registers. Each sum is taken in the order of the inner dimension whatever the batch is:
// a row's result is the same, bit by bit, alone and among others.
#pragma once
#include "tiles.h"

namespace {

constexpr int OUTPUTS = 3 * VL;              // of a panel
constexpr int DEPTH = 6144 / OUTPUTS;        // of the inner dimension at a time: 24 KiB of fp32
constexpr int ROWS_AT_ONCE = 120;            // whose inputs stay in the cache meanwhile
constexpr int64_t SMALL_LINEAR = 1 << 19;    // multiplications that aren't worth threads
constexpr int READING = 8;                   // reading a weight takes as long as so many of them

// c[r][OUTPUTS] (+)= x[r][0…count) x w[count][OUTPUTS], for R rows.
template <int R, bool ADD, class T>
PD_INLINE void block(const float* x, int64_t x_row, const T* w, int count, float* c) {
  vf sum[R][3];
  PD_UNROLL
  for (int r = 0; r < R; ++r) {
    PD_UNROLL
    for (int i = 0; i < 3; ++i) sum[r][i] = ADD ? load(c + r * OUTPUTS + i * VL) : vf{};
  }
  for (int k = 0; k < count; ++k, w += OUTPUTS) {
    if (R < MICRO_ROWS) prefetch(w + 12 * OUTPUTS, OUTPUTS * sizeof(T));
    const vf w0 = load(w), w1 = load(w + VL), w2 = load(w + 2 * VL);
    PD_UNROLL
    for (int r = 0; r < R; ++r) {
      const vf a = splat(x[r * x_row + k]);
      sum[r][0] += a * w0;
      sum[r][1] += a * w1;
      sum[r][2] += a * w2;
    }
  }
  PD_UNROLL
  for (int r = 0; r < R; ++r) {
    PD_UNROLL
    for (int i = 0; i < 3; ++i) store(c + r * OUTPUTS + i * VL, sum[r][i]);
  }
}

template <int R, class T>
__attribute__((noinline)) void block_of(const float* x, int64_t x_row, const T* w, int count,
                                        float* c, bool add) {
  if (add) block<R, true>(x, x_row, w, count, c);
  else block<R, false>(x, x_row, w, count, c);
}

// The last rows, fewer than MICRO_ROWS.
template <int R, class T>
PD_INLINE void rest(int rows, const float* x, int64_t x_row, const T* w, int count, float* c,
                    bool add) {
  if constexpr (R > 0) {
    if (rows == R) block_of<R>(x, x_row, w, count, c, add);
    else rest<R - 1>(rows, x, x_row, w, count, c, add);
  }
}

template <class T>
PD_INLINE void all_rows(int rows, const float* x, int64_t x_row, const T* w, int count, float* c,
                        bool add) {
  int r = 0;
  for (; r + MICRO_ROWS <= rows; r += MICRO_ROWS)
    block_of<MICRO_ROWS>(x + r * x_row, x_row, w, count, c + r * OUTPUTS, add);
  rest<MICRO_ROWS - 1>(rows - r, x + r * x_row, x_row, w, count, c + r * OUTPUTS, add);
}

PD_INLINE const float* widened(const float* w, int, float*) { return w; }

template <class T>
PD_INLINE const float* widened(const T* w, int count, float* to) {
  for (int i = 0; i < count; i += VL) store(to + i, load(w + i));
  return to;
}

// One panel's outputs for some rows, x being [rows][inner] in fp32.
template <class T>
void panel_rows(const PdLinear& l, const float* x, int64_t x_row, int first, int rows, int panel,
                float* c, float* wide) {
  const T* w = static_cast<const T*>(l.packed) + static_cast<int64_t>(panel) * l.inner * OUTPUTS;
  const float* from = x + first * x_row;
  for (int k = 0; k < l.inner; k += DEPTH) {
    const int count = min_of(DEPTH, l.inner - k);
    const T* part = w + static_cast<int64_t>(k) * OUTPUTS;
    if (rows > 2 * MICRO_ROWS)  // widening once costs less than for each block of rows
      all_rows(rows, from + k, x_row, widened(part, count * OUTPUTS, wide), count, c, k > 0);
    else
      all_rows(rows, from + k, x_row, part, count, c, k > 0);
  }
  const int n = panel * OUTPUTS, outputs = min_of(OUTPUTS, l.outer - n);
  const T* bias = l.bias ? static_cast<const T*>(l.bias) + n : nullptr;
  for (int r = 0; r < rows; ++r) {
    T* y = static_cast<T*>(l.y) + (first + r) * l.y_row + n;
    for (int i = 0; i < outputs; ++i)
      narrow(c[r * OUTPUTS + i] + (bias ? widen(bias[i]) : 0.0f), y + i);
  }
}

PD_INLINE const float* as_floats(const PdLinear& l, const float* x, Scratch&, int64_t* x_row) {
  *x_row = l.x_row;
  return x;
}

template <class T>
PD_INLINE const float* as_floats(const PdLinear& l, const T* x, Scratch& scratch,
                                 int64_t* x_row) {
  float* to = scratch.floats(static_cast<size_t>(l.rows) * l.inner);
  *x_row = l.inner;
  for (int r = 0; r < l.rows; ++r)
    for (int k = 0; k < l.inner; ++k)
      to[static_cast<int64_t>(r) * l.inner + k] = widen(x[r * l.x_row + k]);
  return to;
}

PD_INLINE int panels_of(const PdLinear& l) { return (l.outer + OUTPUTS - 1) / OUTPUTS; }

// How a call is cut into items for the threads: some rows, some panels.
struct Shares {
  int threads, panels, group, groups, chunks;
  int items() const { return chunks * groups; }
  int first_row(int item) const { return item / groups * ROWS_AT_ONCE; }
  int first_panel(int item) const { return item % groups * group; }
  int end_panel(int item) const { return min_of(panels, first_panel(item) + group); }
};

PD_INLINE Shares shares_of(const PdLinear& l) {
  const int64_t work = static_cast<int64_t>(l.rows + READING) * l.inner * l.outer;
  const int threads = team(l.threads, work < SMALL_LINEAR), panels = panels_of(l);
  // Panels go out in groups: few enough to keep all threads busy to the end.
  const int group = max_of(1, panels / (threads * 8));
  const int groups = (panels + group - 1) / group;
  return {threads, panels, group, groups, (l.rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE};
}

template <class T>
void linear_as(const PdLinear& l) {
  static thread_local Scratch inputs;
  int64_t x_row;
  const float* x = as_floats(l, static_cast<const T*>(l.x), inputs, &x_row);
  const Shares s = shares_of(l);
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
  {
    static thread_local Scratch own;
    float* c = own.floats(ROWS_AT_ONCE * OUTPUTS + DEPTH * OUTPUTS);
    float* wide = c + ROWS_AT_ONCE * OUTPUTS;
#pragma omp for schedule(dynamic, 1)
    for (int item = 0; item < s.items(); ++item) {
      const int first = s.first_row(item), rows = min_of(ROWS_AT_ONCE, l.rows - first);
      for (int panel = s.first_panel(item); panel < s.end_panel(item); ++panel)
        panel_rows<T>(l, x, x_row, first, rows, panel, c, wide);
    }
  }
}

// weight [outer, inner], dense -> packed. As bits: zero is zero in all storage types.
template <class T>
void pack_as(const PdLinear& l, const T* weight, T* packed) {
  const int panels = panels_of(l);
#pragma omp parallel for schedule(static) num_threads(team(l.threads, false))
  for (int panel = 0; panel < panels; ++panel) {
    T* to = packed + static_cast<int64_t>(panel) * l.inner * OUTPUTS;
    const int n = panel * OUTPUTS, outputs = min_of(OUTPUTS, l.outer - n);
    for (int k = 0; k < l.inner; ++k, to += OUTPUTS)
      for (int i = 0; i < OUTPUTS; ++i)
        to[i] = i < outputs ? weight[static_cast<int64_t>(n + i) * l.inner + k] : T{};
  }
}

}  // namespace
