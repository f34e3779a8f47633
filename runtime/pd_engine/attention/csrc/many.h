// Many queries (prefill): lanes of vectors are queries, so scores, maxima and sums need no
// sums across lanes, and keys and values are used as they lie, without a transposition.
// Both products are the same small matrix kernel with all its sums in registers.
#pragma once
#include "tiles.h"

namespace {

constexpr int PANEL = 3 * VL;   // queries that a kernel call works on
constexpr int LANES = 96;       // queries (x group) of an item: whole panels for every VL
static_assert(LANES % PANEL == 0, "an item has whole panels");

// out[r][PANEL] (+)= sum over n of a[r * a_row + n * a_step] x b[n][PANEL], MICRO_ROWS rows.
template <bool ADD>
__attribute__((noinline)) void micro(const float* a, int64_t a_row, int64_t a_step, const float* b, int count,
                     const vf* scale, float* out) {
  vf sum[MICRO_ROWS][3];
  PD_UNROLL
  for (int r = 0; r < MICRO_ROWS; ++r)
    PD_UNROLL
    for (int w = 0; w < 3; ++w)
      sum[r][w] = ADD ? load(out + r * PANEL + w * VL) * scale[w] : vf{};
  for (int n = 0; n < count; ++n) {
    const vf b0 = load(b), b1 = load(b + VL), b2 = load(b + 2 * VL);
    b += PANEL;
    PD_UNROLL
    for (int r = 0; r < MICRO_ROWS; ++r) {
      const vf x = splat(a[r * a_row]);
      sum[r][0] += x * b0;
      sum[r][1] += x * b1;
      sum[r][2] += x * b2;
    }
    a += a_step;
  }
  PD_UNROLL
  for (int r = 0; r < MICRO_ROWS; ++r)
    PD_UNROLL
    for (int w = 0; w < 3; ++w) store(out + r * PANEL + w * VL, sum[r][w]);
}

// A panel's state; pointers into the thread's scratch.
struct Panel {
  float *q, *acc;      // [padded dim][PANEL]
  float *most, *sum;   // [PANEL]
  int32_t *from, *last;  // [PANEL] the keys that each query sees
};

struct ManyMemory {
  float *keys, *values, *scores;
  int padded;  // head_dim in whole kernel rows
};

template <class T>
void copy_tile(const PdStep& s, const T* const* keys, int count, int head, int padded,
               float* to_keys, float* to_values) {
  const int dim = s.head_dim, whole = dim / VL * VL;
  for (int j = 0; j < TILE; ++j, to_keys += padded, to_values += padded) {
    if (j >= count) {  // weighs nothing; but what lies here must be a number
      for (int d = 0; d < padded; ++d) to_keys[d] = to_values[d] = 0;
      continue;
    }
    const T* key = keys[j] + static_cast<int64_t>(head) * dim;
    const T* value = key + s.half_stride;
    for (int d = 0; d < whole; d += VL) {
      store(to_keys + d, load(key + d));
      store(to_values + d, load(value + d));
    }
    for (int d = whole; d < padded; ++d) {
      to_keys[d] = d < dim ? widen(key[d]) : 0;
      to_values[d] = d < dim ? widen(value[d]) : 0;
    }
  }
}

// Scores [rows][PANEL] -> weights in place, with the new maxima; gives what scales the old.
PD_INLINE void weigh_panel(float* scores, int rows, int first, bool edge, float cap, Panel p,
                           vf* scale) {
  PD_UNROLL
  for (int w = 0; w < 3; ++w) {
    const int at = w * VL;
    vi from, last;
    __builtin_memcpy(&from, p.from + at, sizeof from);
    __builtin_memcpy(&last, p.last + at, sizeof last);
    const vf before = load(p.most + at);
    vf top = before;
    for (int j = 0; j < rows; ++j) {
      float* x = scores + j * PANEL + at;
      vf score = load(x);
      if (cap != 0) score = cap_scores(score, cap);
      if (edge) {
        const vi key = vi{} + (first + j);
        score = select((key >= from) & (key <= last), score, splat(-__builtin_inff()));
      }
      if (edge || cap != 0) store(x, score);
      top = vmax(top, score);
    }
    vf sum{};
    for (int j = 0; j < rows; ++j) {
      float* x = scores + j * PANEL + at;
      const vf weight = vexp(load(x) - top);
      store(x, weight);
      sum += weight;
    }
    scale[w] = vexp(before - top);
    store(p.most + at, top);
    store(p.sum + at, load(p.sum + at) * scale[w] + sum);
  }
}

PD_INLINE void many_tile(const PdStep& s, const PdLayer& l, const ManyMemory& m, Panel p,
                         int first, int count, bool edge) {
  const int rows = (count + MICRO_ROWS - 1) / MICRO_ROWS * MICRO_ROWS;
  (void)s;
  for (int j = 0; j < rows; j += MICRO_ROWS)
    micro<false>(m.keys + j * m.padded, m.padded, 1, p.q, m.padded, nullptr,
                 m.scores + j * PANEL);
  vf scale[3];
  weigh_panel(m.scores, rows, first, edge || rows > count, l.softcap, p, scale);
  for (int d = 0; d < m.padded; d += MICRO_ROWS)
    micro<true>(m.values + d, 1, m.padded, m.scores, rows, scale, p.acc + d * PANEL);
}

// Fills a panel's queries; lanes without one see no key and stay 0.
template <class T>
void open_panel(const PdStep& s, const PdLayer& l, const Item& it, int lane, int padded,
                Panel p) {
  const int group = s.heads / s.kv_heads, dim = s.head_dim;
  const float scale = l.softcap != 0 ? l.scale / l.softcap : l.scale;
  std::memset(p.q, 0, sizeof(float) * padded * PANEL);
  std::memset(p.acc, 0, sizeof(float) * padded * PANEL);
  for (int i = 0; i < PANEL; ++i) {
    p.most[i] = NONE;
    p.sum[i] = 0;
    p.from[i] = 0;
    p.last[i] = -1;
    const int query = (lane + i) / group;
    if (query >= it.queries) continue;
    const int64_t token = s.begin[it.row] + it.query + query;
    const int64_t q_head = it.head * group + (lane + i) % group;
    const T* q = static_cast<const T*>(l.q) + q_head * l.q_head + token * l.q_token;
    for (int d = 0; d < dim; ++d) p.q[d * PANEL + i] = widen(q[d]) * scale;
    p.last[i] = s.start[it.row] + it.query + query;
    p.from[i] = l.window ? max_of(0, p.last[i] + 1 - l.window) : 0;
  }
}

template <class T>
void close_panel(const PdStep& s, const PdLayer& l, const Item& it, int lane, Panel p,
                 float* partials) {
  const int group = s.heads / s.kv_heads, dim = s.head_dim;
  for (int i = 0; i < PANEL && (lane + i) / group < it.queries; ++i) {
    const int query = (lane + i) / group, q_head = it.head * group + (lane + i) % group;
    if (it.partial >= 0) {
      float* to = partial_of(s, partials, it, query, q_head);
      to[0] = p.most[i];
      to[1] = p.sum[i];
      for (int d = 0; d < dim; ++d) to[2 + d] = p.acc[d * PANEL + i];
      continue;
    }
    const float share = 1.0f / divisor(l, q_head, p.most[i], p.sum[i]);
    T* out = out_of<T>(s, l, it.row, it.query + query, q_head);
    for (int d = 0; d < dim; ++d) narrow(p.acc[d * PANEL + i] * share, out + d);
  }
}

// An item of one KV head.
template <class T>
void attend_many(const PdStep& s, const PdLayer& l, const Item& it, float* partials,
                 Scratch& scratch) {
  const int group = s.heads / s.kv_heads;
  const int panels = (it.queries * group + PANEL - 1) / PANEL;
  ManyMemory m;
  m.padded = (s.head_dim + MICRO_ROWS - 1) / MICRO_ROWS * MICRO_ROWS;
  const int64_t each = static_cast<int64_t>(2 * m.padded + 4) * PANEL;
  m.keys = scratch.floats(each * panels + 2 * TILE * m.padded + TILE * PANEL);
  m.values = m.keys + TILE * m.padded;
  m.scores = m.values + TILE * m.padded;
  float* rest = m.scores + TILE * PANEL;
  auto panel = [&](int i) {
    float* at = rest + i * each;
    Panel p;
    p.q = at;
    p.acc = p.q + m.padded * PANEL;
    p.most = p.acc + m.padded * PANEL;
    p.sum = p.most + PANEL;
    p.from = reinterpret_cast<int32_t*>(p.sum + PANEL);
    p.last = p.from + PANEL;
    return p;
  };
  for (int i = 0; i < panels; ++i) open_panel<T>(s, l, it, i * PANEL, m.padded, panel(i));
  const T* keys[TILE];
  for (int first = it.first; first < it.end; first += TILE) {
    const int count = min_of(TILE, it.end - first);
    find_keys(s, l, it.row, first, first + count, keys);
    copy_tile(s, keys, count, it.head, m.padded, m.keys, m.values);
    for (int i = 0; i < panels; ++i) {
      const int lane = i * PANEL, lanes = it.queries * group;
      const int early = s.start[it.row] + it.query + lane / group;
      const int late = s.start[it.row] + it.query + (min_of(lane + PANEL, lanes) - 1) / group;
      if (first > late || (l.window && first + count <= early + 1 - l.window)) continue;
      const bool edge = lane + PANEL > lanes || first + count - 1 > early ||
                        (l.window && first < late + 1 - l.window);
      const int seen = min_of(count, late + 1 - first);
      many_tile(s, l, m, panel(i), first, seen, edge);
    }
  }
  for (int i = 0; i < panels; ++i) close_panel<T>(s, l, it, i * PANEL, panel(i), partials);
}

}  // namespace
