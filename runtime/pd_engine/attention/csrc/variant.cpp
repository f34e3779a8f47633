// The op for one instruction set: cuts a batch into items, shares them out among threads,
// puts split contexts together. Compiled once for each of build.py's variants.
#include "few.h"
#include "linear.h"
#include "many.h"
#include "norm.h"
#include "pairs.h"
#include "rotary.h"

namespace {

constexpr int SPLIT_FEW = 256;    // keys of an item with few queries: enough items at batch 1
constexpr int SPLIT_MANY = 1024;  // of one with many, if its row makes too few items else
constexpr int ENOUGH_ITEMS = 16;  // of a row, so that its contexts needn't be split
constexpr int64_t SMALL = 1 << 16;  // multiplications below which threads cost more than they save

// A growing array without the standard library's templates (vectors.h says why).
template <class X>
class List {
 public:
  void clear() { size_ = 0; }
  void push(const X& x) {
    if (size_ == capacity_) {
      capacity_ = size_ * 2 + 64;
      data_ = static_cast<X*>(std::realloc(data_, capacity_ * sizeof(X)));
      if (!data_) std::abort();
    }
    data_[size_++] = x;
  }
  int64_t size() const { return size_; }
  const X& operator[](int64_t i) const { return data_[i]; }
  ~List() { std::free(data_); }

 private:
  X* data_ = nullptr;
  int64_t size_ = 0, capacity_ = 0;
};

// What a call computes, made by the calling thread.
struct Plan {
  List<Item> items;
  List<Merge> merges;
  int64_t partials;  // results of splits, of one query of one head each
  int64_t work;      // multiplications, about
  int heads;         // KV heads of an item with few queries
};

struct RowTiles {
  int row, tokens, queries, tiles;  // queries of a tile
  bool few;
};

RowTiles tiles_of(const PdStep& s, int row) {
  const int group = s.heads / s.kv_heads, tokens = s.begin[row + 1] - s.begin[row];
  if (tokens * group <= FEW || tokens == 1) return {row, tokens, tokens, 1, true};
  const int queries = max_of(1, LANES / group);
  return {row, tokens, queries, (tokens + queries - 1) / queries, false};
}

void plan_tile(const PdStep& s, const PdLayer& l, const RowTiles& t, int tile, Plan& plan) {
  const int query = tile * t.queries, queries = min_of(t.queries, t.tokens - query);
  const int position = s.start[t.row] + query, end = position + queries;
  const int low = l.window ? max_of(0, position + 1 - l.window) : 0;
  const bool split_up = t.few || t.tiles * s.kv_heads < ENOUGH_ITEMS;
  const int size = !split_up ? end : t.few ? SPLIT_FEW : SPLIT_MANY;
  const int split = low / size, splits = (end - 1) / size - split + 1;
  const bool merged = splits > 1;
  if (merged) plan.merges.push({t.row, query, queries, splits, plan.partials});
  const int heads = t.few ? plan.heads : 1;
  for (int i = split; i < split + splits; ++i) {
    // With many queries a tile begins at a multiple of TILE; masks hide what lies before.
    const int from = max_of(i * size, t.few ? low : low / TILE * TILE);
    const int to = min_of(end, (i + 1) * size);
    for (int head = 0; head < s.kv_heads; head += heads) {
      const int count = min_of(heads, s.kv_heads - head);
      plan.items.push({t.row, head, count, query, queries, from, to,
                       merged ? plan.partials : int64_t{-1}});
    }
    if (merged) plan.partials += static_cast<int64_t>(queries) * s.heads;
    plan.work += static_cast<int64_t>(to - from) * queries * s.heads * s.head_dim * 2;
  }
}

void make_plan(const PdStep& s, const PdLayer& l, Plan& plan) {
  plan.items.clear();
  plan.merges.clear();
  plan.partials = plan.work = 0;
  int64_t splits = 0;
  for (int row = 0; row < s.rows; ++row) {
    const int context = s.start[row] + 1;
    splits += (l.window ? min_of(l.window, context) : context) / SPLIT_FEW + 1;
  }
  // All heads of a key lie side by side: reading them together is kinder to memory, as long
  // as all threads have something to do.
  plan.heads = splits >= 4 * team(s.threads, false) ? s.kv_heads : 1;
  for (int row = 0; row < s.rows; ++row) {
    const RowTiles t = tiles_of(s, row);
    for (int tile = t.tiles - 1; tile >= 0; --tile) plan_tile(s, l, t, tile, plan);
  }
}

template <class T>
void run_item(const PdStep& s, const PdLayer& l, const Item& it, float* partials) {
  static thread_local Scratch scratch;
  const int group = s.heads / s.kv_heads, tokens = s.begin[it.row + 1] - s.begin[it.row];
  if (tokens * group <= FEW || tokens == 1)
    attend_few<T>(s, l, it, partials, scratch);
  else
    attend_many<T>(s, l, it, partials, scratch);
}

// One query of one head, from its splits, always in the same order.
template <class T>
void merge_one(const PdStep& s, const PdLayer& l, const Merge& m, int query, int head,
               const float* partials) {
  const int dim = s.head_dim;
  const int64_t each = dim + 2, next = static_cast<int64_t>(m.queries) * s.heads * each;
  const float* first =
      partials + (m.partial + static_cast<int64_t>(query) * s.heads + head) * each;
  float most = NONE;
  for (int i = 0; i < m.splits; ++i) most = first[i * next] > most ? first[i * next] : most;
  float sum = 0;
  T* out = out_of<T>(s, l, m.row, m.query + query, head);
  float acc[256];
  for (int from = 0; from < dim; from += 256) {
    const int count = min_of(256, dim - from);
    for (int d = 0; d < count; ++d) acc[d] = 0;
    sum = 0;
    for (int i = 0; i < m.splits; ++i) {
      const float* part = first + i * next;
      const float weight = exp_of(part[0] - most);
      sum += weight * part[1];
      for (int d = 0; d < count; ++d) acc[d] += weight * part[2 + from + d];
    }
    const float share = 1.0f / divisor(l, head, most, sum);
    for (int d = 0; d < count; ++d) narrow(acc[d] * share, out + from + d);
  }
}

template <class T>
void attend_as(const PdStep& s, const PdLayer& l) {
  static thread_local Plan plan;
  static thread_local Scratch memory;
  make_plan(s, l, plan);
  float* partials = memory.floats(plan.partials * (s.head_dim + 2));
  const Plan& p = plan;  // thread_local: the other threads would see their own
  const int threads = team(s.threads, p.work < SMALL);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < p.items.size(); ++i) run_item<T>(s, l, p.items[i], partials);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < p.merges.size(); ++i) {
      const Merge& m = p.merges[i];
      for (int query = 0; query < m.queries; ++query)
        for (int head = 0; head < s.heads; ++head)
          merge_one<T>(s, l, m, query, head, partials);
    }
  }
}

void attend(const PdStep* s, const PdLayer* l) {
  if (s->dtype == 0) attend_as<float>(*s, *l);
  else if (s->dtype == 1) attend_as<BFloat16>(*s, *l);
  else attend_as<Float16>(*s, *l);
}

// Storage types are copied as bits.
template <class T>
void write_token(const PdStep& s, const PdLayer& l, int row, int token) {
  const int position = s.start[row] + token - s.begin[row];
  const int64_t block = s.tables[s.table_at[row] + position / s.block_tokens];
  const int64_t place = static_cast<int64_t>(position % s.block_tokens) * s.kv_heads;
  T* to = static_cast<T*>(l.pool) + block * s.block_stride + place * s.head_dim;
  for (int head = 0; head < s.kv_heads; ++head, to += s.head_dim) {
    const T* k = static_cast<const T*>(l.k) + head * l.k_head + token * l.k_token;
    const T* v = static_cast<const T*>(l.v) + head * l.v_head + token * l.v_token;
    std::memcpy(to, k, sizeof(T) * s.head_dim);
    std::memcpy(to + s.half_stride, v, sizeof(T) * s.head_dim);
  }
}

template <class T>
void write_as(const PdStep& s, const PdLayer& l) {
  const int tokens = s.begin[s.rows];
  const int64_t values = static_cast<int64_t>(tokens) * s.kv_heads * s.head_dim;
  const int threads = team(s.threads, values < SMALL);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int part = 0; part < threads; ++part) {
    int row = 0;
    const int64_t end = static_cast<int64_t>(tokens) * (part + 1) / threads;
    for (int64_t token = static_cast<int64_t>(tokens) * part / threads; token < end; ++token) {
      while (s.begin[row + 1] <= token) ++row;
      write_token<T>(s, l, row, static_cast<int>(token));
    }
  }
}

void write(const PdStep* s, const PdLayer* l) {
  if (s->dtype == 0) write_as<float>(*s, *l);
  else write_as<BFloat16>(*s, *l);
}

void linear(const PdLinear* l) {
  if (l->dtype == 0) linear_as<float>(*l);
#if defined(__AVX512BF16__)
  else if (l->dtype == 1) pair_linear(*l);
#else
  else if (l->dtype == 1) linear_as<BFloat16>(*l);
#endif
  else linear_as<Float16>(*l);
}

void pack(const PdLinear* l, const void* weight, void* packed) {
  const auto* half = static_cast<const uint16_t*>(weight);
  if (l->dtype == 0)
    pack_as(*l, static_cast<const uint32_t*>(weight), static_cast<uint32_t*>(packed));
#if defined(__AVX512BF16__)
  else if (l->dtype == 1) pair_pack(*l, half, static_cast<uint16_t*>(packed));
#endif
  else pack_as(*l, half, static_cast<uint16_t*>(packed));
}

}  // namespace

#define PD_NAME_(x) pd_variant_##x
#define PD_NAME(x) PD_NAME_(x)
#define PD_TEXT_(x) #x
#define PD_TEXT(x) PD_TEXT_(x)

extern const PdVariant PD_NAME(PD_VARIANT);
const PdVariant PD_NAME(PD_VARIANT) = {
    PD_TEXT(PD_VARIANT), write, attend, OUTPUTS, pack, linear, norm, rotary};
