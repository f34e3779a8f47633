// Linear layers in bfloat16 on CPUs that multiply it (vdpbf16ps): twice the multiplications of
// fp32, half its bytes. Packed by pairs of the inner dimension, [panel][inner / 2][OUTPUTS][2],
// and where that is odd, its last one behind them, [OUTPUTS]. As in linear.h, a row's sums are
// taken in the same order whatever the batch is.
#pragma once
#include "linear.h"

#if defined(__AVX512BF16__)
namespace {

constexpr int PAIRS = 6144 / OUTPUTS;  // of the inner dimension at a time: 24 KiB

PD_INLINE __m512bh pairs_of(const BFloat16* p) {
  return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p));
}

PD_INLINE __m512bh pair_everywhere(const BFloat16* p) {
  int32_t both;
  __builtin_memcpy(&both, p, sizeof both);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
}

// c[r][OUTPUTS] (+)= x[r][0…2 count) x w[count][OUTPUTS][2], for R rows.
template <int R, bool ADD>
PD_INLINE void pair_block(const BFloat16* x, int64_t x_row, const BFloat16* w, int count,
                          float* c) {
  __m512 sum[R][3];
  PD_UNROLL
  for (int r = 0; r < R; ++r) {
    PD_UNROLL
    for (int i = 0; i < 3; ++i)
      sum[r][i] = ADD ? _mm512_loadu_ps(c + r * OUTPUTS + i * VL) : _mm512_setzero_ps();
  }
  for (int k = 0; k < count; ++k, w += 2 * OUTPUTS) {
    if (R < MICRO_ROWS) prefetch(w + 24 * OUTPUTS, 2 * OUTPUTS * sizeof(BFloat16));
    const __m512bh w0 = pairs_of(w), w1 = pairs_of(w + 2 * VL), w2 = pairs_of(w + 4 * VL);
    PD_UNROLL
    for (int r = 0; r < R; ++r) {
      const __m512bh a = pair_everywhere(x + r * x_row + 2 * k);
      sum[r][0] = _mm512_dpbf16_ps(sum[r][0], a, w0);
      sum[r][1] = _mm512_dpbf16_ps(sum[r][1], a, w1);
      sum[r][2] = _mm512_dpbf16_ps(sum[r][2], a, w2);
    }
  }
  PD_UNROLL
  for (int r = 0; r < R; ++r) {
    PD_UNROLL
    for (int i = 0; i < 3; ++i) _mm512_storeu_ps(c + r * OUTPUTS + i * VL, sum[r][i]);
  }
}

template <int R>
__attribute__((noinline)) void pair_block_of(const BFloat16* x, int64_t x_row, const BFloat16* w,
                                             int count, float* c, bool add) {
  if (add) pair_block<R, true>(x, x_row, w, count, c);
  else pair_block<R, false>(x, x_row, w, count, c);
}

// The last rows, fewer than MICRO_ROWS.
template <int R>
PD_INLINE void pair_rest(int rows, const BFloat16* x, int64_t x_row, const BFloat16* w, int count,
                         float* c, bool add) {
  if constexpr (R > 0) {
    if (rows == R) pair_block_of<R>(x, x_row, w, count, c, add);
    else pair_rest<R - 1>(rows, x, x_row, w, count, c, add);
  }
}

PD_INLINE void pair_rows(int rows, const BFloat16* x, int64_t x_row, const BFloat16* w, int count,
                         float* c, bool add) {
  int r = 0;
  for (; r + MICRO_ROWS <= rows; r += MICRO_ROWS)
    pair_block_of<MICRO_ROWS>(x + r * x_row, x_row, w, count, c + r * OUTPUTS, add);
  pair_rest<MICRO_ROWS - 1>(rows - r, x + r * x_row, x_row, w, count, c + r * OUTPUTS, add);
}

// An odd dimension's last one: c[r] += x[r] * w.
PD_INLINE void last_one(int rows, const BFloat16* x, int64_t x_row, const BFloat16* w, float* c) {
  for (int r = 0; r < rows; ++r, c += OUTPUTS)
    for (int i = 0; i < OUTPUTS; i += VL)
      store(c + i, load(c + i) + splat(widen(x[r * x_row])) * load(w + i));
}

// Sums of a panel, and its bias -> y, rounded to the nearest.
PD_INLINE void put_row(const float* c, const BFloat16* bias, int outputs, BFloat16* y) {
  for (int i = 0; i < outputs; i += VL) {
    const int count = min_of(VL, outputs - i);
    const __mmask16 some = static_cast<__mmask16>((1u << count) - 1);
    __m512 sum = _mm512_loadu_ps(c + i);
    if (bias) {
      const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, bias + i));
      sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)));
    }
    const __m256i half = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(sum));
    _mm256_mask_storeu_epi16(y + i, some, half);
  }
}

// One panel's outputs for some rows.
void pair_panel(const PdLinear& l, int first, int rows, int panel, float* c) {
  const BFloat16* w =
      static_cast<const BFloat16*>(l.packed) + static_cast<int64_t>(panel) * l.inner * OUTPUTS;
  const BFloat16* x = static_cast<const BFloat16*>(l.x) + first * l.x_row;
  const int pairs = l.inner / 2;
  if (pairs == 0) std::memset(c, 0, sizeof(float) * rows * OUTPUTS);
  for (int k = 0; k < pairs; k += PAIRS)
    pair_rows(rows, x + 2 * k, l.x_row, w + static_cast<int64_t>(k) * 2 * OUTPUTS,
              min_of(PAIRS, pairs - k), c, k > 0);
  if (l.inner % 2)
    last_one(rows, x + 2 * pairs, l.x_row, w + static_cast<int64_t>(pairs) * 2 * OUTPUTS, c);
  const int n = panel * OUTPUTS, outputs = min_of(OUTPUTS, l.outer - n);
  const BFloat16* bias = l.bias ? static_cast<const BFloat16*>(l.bias) + n : nullptr;
  BFloat16* y = static_cast<BFloat16*>(l.y) + first * l.y_row + n;
  for (int r = 0; r < rows; ++r) put_row(c + r * OUTPUTS, bias, outputs, y + r * l.y_row);
}

void pair_linear(const PdLinear& l) {
  const Shares s = shares_of(l);
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
  {
    static thread_local Scratch own;
    float* c = own.floats(ROWS_AT_ONCE * OUTPUTS);
#pragma omp for schedule(dynamic, 1)
    for (int item = 0; item < s.items(); ++item) {
      const int first = s.first_row(item), rows = min_of(ROWS_AT_ONCE, l.rows - first);
      for (int panel = s.first_panel(item); panel < s.end_panel(item); ++panel)
        pair_panel(l, first, rows, panel, c);
    }
  }
}

// weight [outer, inner], dense -> packed.
void pair_pack(const PdLinear& l, const uint16_t* weight, uint16_t* packed) {
  const int panels = panels_of(l);
#pragma omp parallel for schedule(static) num_threads(team(l.threads, false))
  for (int panel = 0; panel < panels; ++panel) {
    uint16_t* to = packed + static_cast<int64_t>(panel) * l.inner * OUTPUTS;
    const int n = panel * OUTPUTS, outputs = min_of(OUTPUTS, l.outer - n);
    for (int k = 0; k < l.inner; k += 2) {
      const int both = min_of(2, l.inner - k);
      for (int i = 0; i < OUTPUTS; ++i)
        for (int j = 0; j < both; ++j)
          *to++ = i < outputs ? weight[static_cast<int64_t>(n + i) * l.inner + k + j] : 0;
    }
  }
}

}  // namespace
#endif
