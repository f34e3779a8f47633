// A few queries (decode): each key is read once, its dot products taken with all queries of
// its group. Bound by memory, so the next keys and values are fetched ahead.
#pragma once
#include "tiles.h"

namespace {

constexpr int FEW = 16;  // vectors (queries x group) up to which this way is the faster one
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int AT_ONCE = 4;  // vectors whose sums are in registers together
#else
constexpr int AT_ONCE = 3;
#endif
constexpr int KEYS = 4;

// scores[n][TILE] of N vectors q[n][dim] with four keys at a time.
template <int N, class T>
PD_INLINE void dots(const float* q, int dim, const T* const* keys, int j, int count, int64_t offset,
                    int64_t ahead, float* scores) {
  const int whole = dim / VL * VL;
  {
    const T* key[KEYS];
    PD_UNROLL
    for (int i = 0; i < KEYS; ++i) {
      key[i] = keys[min_of(j + i, count - 1)] + offset;  // the last one again: harmless
      prefetch(key[i] + ahead, dim * sizeof(T));
    }
    vf acc[N][KEYS];
    PD_UNROLL
    for (int n = 0; n < N; ++n)
      PD_UNROLL
      for (int i = 0; i < KEYS; ++i) acc[n][i] = vf{};
    for (int d = 0; d < whole; d += VL) {
      vf x[N];
      PD_UNROLL
      for (int n = 0; n < N; ++n) x[n] = load(q + n * dim + d);
      PD_UNROLL
      for (int i = 0; i < KEYS; ++i) {
        const vf k = load(key[i] + d);
        PD_UNROLL
        for (int n = 0; n < N; ++n) acc[n][i] += k * x[n];
      }
    }
    PD_UNROLL
    for (int n = 0; n < N; ++n) {
      v4f sums = totals(fold(acc[n][0]), fold(acc[n][1]), fold(acc[n][2]), fold(acc[n][3]));
      for (int d = whole; d < dim; ++d)
        PD_UNROLL
        for (int i = 0; i < KEYS; ++i) sums[i] += widen(key[i][d]) * q[n * dim + d];
      __builtin_memcpy(scores + n * TILE + j, &sums, sizeof sums);
    }
  }
}

// acc[n][dim] += weights[n][TILE] x values, in strips of the dimension that fit registers.
template <int N, int W, class T>
PD_INLINE void add_strip(float* acc, int dim, int d, const T* const* values, int count,
                         int64_t offset, const float* weights) {
  vf sum[N][W];
  PD_UNROLL
  for (int n = 0; n < N; ++n)
    PD_UNROLL
    for (int w = 0; w < W; ++w) sum[n][w] = load(acc + n * dim + d + w * VL);
  for (int j = 0; j < count; ++j) {
    const T* value = values[j] + offset + d;
    vf weight[N];
    PD_UNROLL
    for (int n = 0; n < N; ++n) weight[n] = splat(weights[n * TILE + j]);
    PD_UNROLL
    for (int w = 0; w < W; ++w) {
      const vf v = load(value + w * VL);
      PD_UNROLL
      for (int n = 0; n < N; ++n) sum[n][w] += weight[n] * v;
    }
  }
  PD_UNROLL
  for (int n = 0; n < N; ++n)
    PD_UNROLL
    for (int w = 0; w < W; ++w) store(acc + n * dim + d + w * VL, sum[n][w]);
}

template <int N, class T>
PD_INLINE void add_values(float* acc, int dim, const T* const* values, int count,
                          int64_t offset, const float* weights) {
  constexpr int W = N == 1 ? 8 : 4;
  int d = 0;
  for (; d + W * VL <= dim; d += W * VL)
    add_strip<N, W>(acc, dim, d, values, count, offset, weights);
  for (; d + VL <= dim; d += VL) add_strip<N, 1>(acc, dim, d, values, count, offset, weights);
  for (; d < dim; ++d)
    PD_UNROLL
    for (int n = 0; n < N; ++n)
      for (int j = 0; j < count; ++j)
        acc[n * dim + d] += weights[n * TILE + j] * widen(values[j][offset + d]);
}

template <int N>
struct Count {
  static constexpr int n = N;
};

// Calls f(first vector, how many as a constant) for all vectors, in parts of about one size.
template <class F>
PD_INLINE void by_parts(int vectors, F f) {
  const int parts = (vectors + AT_ONCE - 1) / AT_ONCE;
  for (int part = 0, v = 0; part < parts; ++part) {
    const int n = (vectors - v + parts - part - 1) / (parts - part);
    if (n == 1) f(v, Count<1>{});
    else if (n == 2) f(v, Count<2>{});
    else if (n == 3 || AT_ONCE == 3) f(v, Count<3>{});
    else f(v, Count<AT_ONCE>{});
    v += n;
  }
}

// Scores -> weights in place; raises the maximum, scales down what was summed before.
PD_INLINE void weigh(float* scores, int count, float cap, float* most, float* sum, float* acc,
                     int dim) {
  for (int j = count; j % VL; ++j) scores[j] = -__builtin_inff();
  vf top = splat(*most);
  for (int j = 0; j < count; j += VL) {
    vf x = load(scores + j);
    if (cap != 0) {
      x = select(x > splat(NONE), cap_scores(x, cap), x);
      store(scores + j, x);
    }
    top = vmax(top, x);
  }
  float now = *most;
  for (int i = 0; i < VL; ++i) now = top[i] > now ? top[i] : now;
  vf sums{};
  for (int j = 0; j < count; j += VL) {
    const vf weight = vexp(load(scores + j) - splat(now));
    sums += weight;
    store(scores + j, weight);
  }
  if (now > *most) {
    const float scale = exp_of(*most - now);
    *sum *= scale;
    for (int d = 0; d < dim; ++d) acc[d] *= scale;
    *most = now;
  }
  *sum += total(sums);
}

// One KV head's share of an item: `vectors` queries [vectors][dim] with their states.
struct FewState {
  float *q, *acc, *most, *sum;
};

template <class T, class S>
void few_tile(const PdStep& s, const PdLayer& l, const Item& it, S state,
              int first, int count, const T* const* keys, const T* const* next, int next_count,
              float* scores) {
  const int dim = s.head_dim, group = s.heads / s.kv_heads, vectors = it.queries * group;
  for (int j = 0; j < count; j += KEYS)
    for (int h = 0; h < it.heads; ++h) {
      const FewState st = state(h);
      const int64_t offset = static_cast<int64_t>(it.head + h) * dim;
      by_parts(vectors, [&](int v, auto c) {
        dots<decltype(c)::n>(st.q + v * dim, dim, keys, j, count, offset, s.half_stride,
                             scores + (h * vectors + v) * TILE);
      });
    }
  const int position = s.start[it.row] + it.query;
  for (int h = 0; h < it.heads; ++h) {
    const FewState st = state(h);
    const int64_t offset = static_cast<int64_t>(it.head + h) * dim;
    float* const mine0 = scores + h * vectors * TILE;
    for (int v = 0; v < vectors; ++v) {
      float* mine = mine0 + v * TILE;
      const int last = position + v / group;
      for (int j = max_of(0, last + 1 - first); j < count; ++j) mine[j] = -__builtin_inff();
      if (l.window)
        for (int j = 0; j < min_of(count, last + 1 - l.window - first); ++j)
          mine[j] = -__builtin_inff();
      weigh(mine, count, l.softcap, st.most + v, st.sum + v, st.acc + v * dim, dim);
    }
    for (int j = 0; j < next_count; ++j) prefetch(next[j] + offset, dim * sizeof(T));
    by_parts(vectors, [&](int v, auto c) {
      add_values<decltype(c)::n>(st.acc + v * dim, dim, keys, count, offset + s.half_stride,
                                 mine0 + v * TILE);
    });
  }
}

template <class T>
void finish_few(const PdStep& s, const PdLayer& l, const Item& it, int head, FewState st,
                float* partials) {
  const int dim = s.head_dim, group = s.heads / s.kv_heads;
  for (int v = 0; v < it.queries * group; ++v) {
    const int query = it.query + v / group, q_head = head * group + v % group;
    const float* acc = st.acc + v * dim;
    if (it.partial >= 0) {
      float* to = partial_of(s, partials, it, query - it.query, q_head);
      to[0] = st.most[v];
      to[1] = st.sum[v];
      for (int d = 0; d < dim; ++d) to[2 + d] = acc[d];
      continue;
    }
    const float share = 1.0f / divisor(l, q_head, st.most[v], st.sum[v]);
    T* out = out_of<T>(s, l, it.row, query, q_head);
    for (int d = 0; d < dim; ++d) narrow(acc[d] * share, out + d);
  }
}

template <class T>
void attend_few(const PdStep& s, const PdLayer& l, const Item& it, float* partials,
                Scratch& scratch) {
  const int dim = s.head_dim, group = s.heads / s.kv_heads, vectors = it.queries * group;
  const int64_t each = static_cast<int64_t>(vectors) * (2 * dim + 2);
  float* memory = scratch.floats((each + vectors * TILE) * it.heads);
  float* scores = memory + each * it.heads;
  const float scale = l.softcap != 0 ? l.scale / l.softcap : l.scale;
  auto state = [&](int i) {
    float* at = memory + i * each;
    float* acc = at + vectors * dim;
    return FewState{at, acc, acc + vectors * dim, acc + vectors * dim + vectors};
  };
  for (int i = 0; i < it.heads; ++i) {
    const FewState st = state(i);
    for (int v = 0; v < vectors; ++v) {
      const int64_t q_head = (it.head + i) * group + v % group;
      const int64_t token = s.begin[it.row] + it.query + v / group;
      const T* q = static_cast<const T*>(l.q) + q_head * l.q_head + token * l.q_token;
      for (int d = 0; d < dim; ++d) {
        st.q[v * dim + d] = widen(q[d]) * scale;
        st.acc[v * dim + d] = 0;
      }
      st.most[v] = NONE;
      st.sum[v] = 0;
    }
  }
  const T* keys[2][TILE];
  int first = it.first, end = min_of(it.end, it.first / TILE * TILE + TILE), now = 0;
  find_keys(s, l, it.row, first, end, keys[0]);
  while (first < end) {
    const int next_end = min_of(it.end, end + TILE);
    find_keys(s, l, it.row, end, next_end, keys[1 - now]);
    few_tile<T>(s, l, it, state, first, end - first, keys[now], keys[1 - now],
                next_end - end, scores);
    first = end;
    end = next_end;
    now = 1 - now;
  }
  for (int i = 0; i < it.heads; ++i) finish_few<T>(s, l, it, it.head + i, state(i), partials);
}

}  // namespace
