// The library's face: picks the variant for this CPU once. Compiled without any -m flags.
#include <cstring>

#include "attention.h"

extern const PdVariant pd_variant_baseline;
#if defined(__x86_64__)
extern const PdVariant pd_variant_avx2;
extern const PdVariant pd_variant_avx512;
extern const PdVariant pd_variant_avx512bf16;
#endif

namespace {

bool runs(const PdVariant& variant) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (&variant == &pd_variant_avx2) return avx2;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (&variant == &pd_variant_avx512) return avx512;
  if (&variant == &pd_variant_avx512bf16) return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
  return &variant == &pd_variant_baseline;
}

const PdVariant* const all[] = {
#if defined(__x86_64__)
    &pd_variant_avx512bf16,
    &pd_variant_avx512,
    &pd_variant_avx2,
#endif
    &pd_variant_baseline,
};

const PdVariant* best() {
  for (const PdVariant* variant : all)
    if (runs(*variant)) return variant;
  return &pd_variant_baseline;
}

const PdVariant* chosen = best();

}  // namespace

#define PD_API extern "C" __attribute__((visibility("default")))

PD_API int32_t pd_attention_abi() { return PD_ATTENTION_ABI; }

PD_API const char* pd_attention_variant() { return chosen->name; }

// For tests: another variant from now on. 0 when this CPU can't run it or it isn't there.
PD_API int32_t pd_attention_use(const char* name) {
  for (const PdVariant* variant : all) {
    if (std::strcmp(variant->name, name) == 0 && runs(*variant)) {
      chosen = variant;
      return 1;
    }
  }
  return 0;
}

// The first row whose blocks aren't all in a pool of so many, -1 when there is none. What
// follows trusts the tables, and would write anywhere.
PD_API int32_t pd_attention_check(const PdStep* s, int32_t blocks) {
  for (int32_t row = 0; row < s->rows; ++row) {
    const int32_t context = s->start[row] + s->begin[row + 1] - s->begin[row];
    const int32_t* table = s->tables + s->table_at[row];
    for (int32_t i = 0; i < (context + s->block_tokens - 1) / s->block_tokens; ++i)
      if (table[i] < 0 || table[i] >= blocks) return row;
  }
  return -1;
}

// Stores the batch's new keys and values in its blocks.
PD_API void pd_attention_write(const PdStep* step, const PdLayer* layer) {
  chosen->write(step, layer);
}

// Attention of all rows; the keys and values are in the blocks already.
PD_API void pd_attention_attend(const PdStep* step, const PdLayer* layer) {
  chosen->attend(step, layer);
}

// Outputs that lie side by side in packed weights: [outputs / panel][inner][panel], the last
// panel filled up with zeros. Only the variant that packed them can use them.
PD_API int32_t pd_linear_panel() { return chosen->panel; }

PD_API void pd_linear_pack(const PdLinear* linear, const void* weight, void* packed) {
  chosen->pack(linear, weight, packed);
}

PD_API void pd_linear(const PdLinear* linear) { chosen->linear(linear); }

PD_API void pd_norm(const PdNorm* norm) { chosen->norm(norm); }

PD_API void pd_rotary(const PdRotary* rotary) { chosen->rotary(rotary); }
