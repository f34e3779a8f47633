// Root-mean-square normalization, in one pass over a row that is in the cache.
#pragma once
#include "tiles.h"

namespace {

constexpr int64_t SMALL_NORM = 1 << 15;

PD_INLINE float rounded(float x, const float*) { return x; }

template <class T>
PD_INLINE float rounded(float x, const T*) {
  T as;
  narrow(x, &as);
  return widen(as);
}

template <class T>
void norm_row(const PdNorm& p, int64_t row) {
  const T* x = static_cast<const T*>(p.x) + row * p.x_row;
  const T* weight = static_cast<const T*>(p.weight);
  T* y = static_cast<T*>(p.y) + row * p.y_row;
  const int whole = p.dim / VL * VL;
  vf squares{};
  for (int d = 0; d < whole; d += VL) {
    const vf v = load(x + d);
    squares += v * v;
  }
  float sum = total(squares);
  for (int d = whole; d < p.dim; ++d) sum += widen(x[d]) * widen(x[d]);
  const float scale = 1.0f / __builtin_sqrtf(sum / static_cast<float>(p.dim) + p.epsilon);
  if (p.one_more) {
    for (int d = 0; d < p.dim; ++d) narrow(widen(x[d]) * scale * (1.0f + widen(weight[d])), y + d);
  } else {
    for (int d = 0; d < p.dim; ++d) narrow(rounded(widen(x[d]) * scale, y) * widen(weight[d]), y + d);
  }
}

template <class T>
void norm_as(const PdNorm& p) {
  const int64_t work = static_cast<int64_t>(p.rows) * p.dim;
  const int threads = team(p.threads, work < SMALL_NORM);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int row = 0; row < p.rows; ++row) norm_row<T>(p, row);
}

void norm(const PdNorm* p) {
  if (p->dtype == 0) norm_as<float>(*p);
  else if (p->dtype == 1) norm_as<BFloat16>(*p);
  else norm_as<Float16>(*p);
}

}  // namespace
