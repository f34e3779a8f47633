// Rotary position embedding of a step's queries and keys in one call.
#pragma once
#include "tiles.h"

namespace {

constexpr int64_t SMALL_ROTARY = 1 << 15;

template <class T>
void rotate(const T* x, const T* cosines, const T* sines, int rotary, int dim, T* out) {
  const int half = rotary / 2;
  for (int d = 0; d < half; ++d) {
    const float a = widen(x[d]), b = widen(x[half + d]);
    narrow(a * widen(cosines[d]) - b * widen(sines[d]), out + d);
    narrow(b * widen(cosines[half + d]) + a * widen(sines[half + d]), out + half + d);
  }
  for (int d = rotary; d < dim; ++d) out[d] = x[d];
}

template <class T>
void rotate_heads(const PdRotary& p, int64_t token, int heads, const void* x, int64_t x_head,
                  int64_t x_token, void* out) {
  const T* cosines = static_cast<const T*>(p.cosines) + token * p.rotary;
  const T* sines = static_cast<const T*>(p.sines) + token * p.rotary;
  const T* from = static_cast<const T*>(x) + token * x_token;
  T* to = static_cast<T*>(out) + token * heads * p.dim;
  for (int head = 0; head < heads; ++head)
    rotate(from + head * x_head, cosines, sines, p.rotary, p.dim, to + head * p.dim);
}

template <class T>
void rotary_as(const PdRotary& p) {
  const int64_t work = static_cast<int64_t>(p.tokens) * (p.q_heads + p.k_heads) * p.dim;
  const int threads = team(p.threads, work < SMALL_ROTARY);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int token = 0; token < p.tokens; ++token) {
    rotate_heads<T>(p, token, p.q_heads, p.q, p.q_head, p.q_token, p.q_out);
    rotate_heads<T>(p, token, p.k_heads, p.k, p.k_head, p.k_token, p.k_out);
  }
}

void rotary(const PdRotary* p) {
  if (p->dtype == 0) rotary_as<float>(*p);
  else if (p->dtype == 1) rotary_as<BFloat16>(*p);
  else rotary_as<Float16>(*p);
}

}  // namespace
