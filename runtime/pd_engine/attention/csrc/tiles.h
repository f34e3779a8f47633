// What both ways of computing share: a piece of work, the keys' addresses, results.
#pragma once
#include <omp.h>

#include <cstdlib>

#include "attention.h"
#include "vectors.h"

namespace {

constexpr int TILE = 64;  // keys at a time, always from a multiple of it: so a query's sums
                          // don't depend on how its prompt was cut
constexpr float NONE = -1e30f;  // the maximum over no keys; finite, so that differences are

// Queries of one row against a range of keys, for some KV heads.
struct Item {
  int32_t row, head, heads;  // KV heads
  int32_t query, queries;    // of the row
  int32_t first, end;        // positions of keys
  int64_t partial;           // where the results of a split go, -1: straight out
};

// A tile of queries whose keys are split: what the splits found is put together at the end.
struct Merge {
  int32_t row, query, queries, splits;
  int64_t partial;
};

// How many threads a call takes.
PD_INLINE int team(int asked, bool small) {
  if (small) return 1;
  return asked > 0 ? asked : omp_get_max_threads();
}

// Memory that a thread keeps from call to call.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  void* bytes(size_t size) {
    if (size > size_) {
      std::free(data_);
      size_ = (size + size / 2 + 63) / 64 * 64;
      data_ = std::aligned_alloc(64, size_);
      if (!data_) std::abort();
    }
    return data_;
  }
  float* floats(size_t count) { return static_cast<float*>(bytes(count * sizeof(float))); }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// Addresses of a tile's keys for KV head 0; those of values are half_stride on.
template <class T>
PD_INLINE void find_keys(const PdStep& s, const PdLayer& l, int row, int first, int end,
                         const T** keys) {
  const int32_t* table = s.tables + s.table_at[row];
  const int64_t token = static_cast<int64_t>(s.kv_heads) * s.head_dim;
  const T* pool = static_cast<const T*>(l.pool);
  int block = first / s.block_tokens, offset = first % s.block_tokens;
  for (int key = first; key < end; ++block, offset = 0) {
    const T* at = pool + table[block] * s.block_stride + offset * token;
    const int stop = min_of(end, key + s.block_tokens - offset);
    for (; key < stop; ++key, at += token) *keys++ = at;
  }
}

PD_INLINE void prefetch(const void* at, int bytes) {
  const char* p = static_cast<const char*>(at);
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
}

PD_INLINE vf cap_scores(vf x, float cap) { return vtanh(x) * splat(cap); }

// A partial result of one query of one head: maximum, sum, then head_dim values.
PD_INLINE float* partial_of(const PdStep& s, float* partials, const Item& it, int query,
                            int head) {
  const int64_t place = it.partial + static_cast<int64_t>(query) * s.heads + head;
  return partials + place * (s.head_dim + 2);
}

template <class T>
PD_INLINE T* out_of(const PdStep& s, const PdLayer& l, int row, int query, int head) {
  const int64_t token = s.begin[row] + query;
  return static_cast<T*>(l.out) + (token * s.heads + head) * s.head_dim;
}

// What a sum of weights is divided by, with the sink's weight in it.
PD_INLINE float divisor(const PdLayer& l, int head, float most, float sum) {
  if (!l.sinks) return sum;
  const float sink = l.sinks[head];
  if (sink <= most) return sum + exp_of(sink - most);
  // exp(sink - most) may overflow; then nothing is left for the keys, which is right.
  return sum + __builtin_expf(sink - most);
}

}  // namespace
