// XXH3 (64 bits, no seed) over pieces of memory, and the same while they are copied: a byte is
// read once for both. Compiled without -m flags; what a CPU has is found out when it is loaded.
//
// The algorithm is that of the xxHash specification, for inputs of more than 240 bytes that are
// a multiple of 64: stripes of 64 bytes, blocks of 16 stripes, and a last stripe with a secret
// of its own, which is why one stripe is always held back.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kStripe = 64;
constexpr int64_t kStripes = 16;  // of a block
constexpr int64_t kAhead = 4096;  // bytes that are asked for before they are needed

constexpr uint64_t kPrime32_1 = 0x9E3779B1U, kPrime32_2 = 0x85EBCA77U, kPrime32_3 = 0xC2B2AE3DU;
constexpr uint64_t kAvalanche = 0x165667919E3779F9ULL;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87ULL, kPrime64_2 = 0xC2B2AE3D27D4EB4FULL,
                   kPrime64_3 = 0x165667B19E3779F9ULL, kPrime64_4 = 0x85EBCA77C2B2AE63ULL,
                   kPrime64_5 = 0x27D4EB2F165667C5ULL;

alignas(64) const uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

uint64_t read64(const uint8_t* at) {
  uint64_t value;  // little-endian, as all machines are that this runs on
  std::memcpy(&value, at, sizeof value);
  return value;
}

}  // namespace

extern "C" {

// PdChecksum in kv/checksum.py.
struct PdChecksum {
  uint64_t sums[8];
  uint8_t held[kStripe];  // the last stripe so far: it may be the last of all
  uint64_t length;
};

// PdPiece: `size` bytes, a multiple of 64, from `source`; into `target`, unless that is null.
struct PdPiece {
  const uint8_t* source;
  uint8_t* target;
  int64_t size;
};
}

namespace {

void scramble(uint64_t* sums) {
  for (int i = 0; i < 8; ++i) {
    uint64_t sum = sums[i];
    sum ^= sum >> 47;
    sum ^= read64(kSecret + sizeof kSecret - kStripe + 8 * i);
    sums[i] = sum * kPrime32_1;
  }
}

void accumulate(uint64_t* sums, const uint8_t* data, const uint8_t* secret) {
  for (int i = 0; i < 8; ++i) {
    const uint64_t value = read64(data + 8 * i);
    const uint64_t key = value ^ read64(secret + 8 * i);
    sums[i ^ 1] += value;
    sums[i] += (key & 0xffffffffU) * (key >> 32);
  }
}

// Stripes [first, first + count) of a block: into the sums, and to `target` if it isn't null.
using Stripes = void (*)(uint64_t* sums, const uint8_t* data, uint8_t* target, int64_t first,
                         int64_t count);

void stripes_baseline(uint64_t* sums, const uint8_t* data, uint8_t* target, int64_t first,
                      int64_t count) {
  if (target != nullptr) {
    std::memcpy(target, data, static_cast<size_t>(kStripe * count));
    data = target;  // what is there now: the source may change under us
  }
  for (int64_t n = 0; n < count; ++n)
    accumulate(sums, data + kStripe * n, kSecret + 8 * (first + n));
}

#if defined(__x86_64__)
// Stores go around the caches: a target's old bytes needn't be read first.

__attribute__((target("avx2"))) void stripes_avx2(uint64_t* sums, const uint8_t* data,
                                                  uint8_t* target, int64_t first, int64_t count) {
  auto* state = reinterpret_cast<__m256i*>(sums);
  __m256i sum[2] = {_mm256_loadu_si256(state), _mm256_loadu_si256(state + 1)};
  for (int64_t n = 0; n < count; ++n) {
    const uint8_t* at = data + kStripe * n;
    _mm_prefetch(reinterpret_cast<const char*>(at + kAhead), _MM_HINT_T0);
    for (int half = 0; half < 2; ++half) {
      const auto* value_at = reinterpret_cast<const __m256i*>(at + 32 * half);
      const auto* secret = reinterpret_cast<const __m256i*>(kSecret + 8 * (first + n) + 32 * half);
      const __m256i value = _mm256_loadu_si256(value_at);
      const __m256i key = _mm256_xor_si256(value, _mm256_loadu_si256(secret));
      const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
      sum[half] = _mm256_add_epi64(sum[half], _mm256_shuffle_epi32(value, 0x4e));
      sum[half] = _mm256_add_epi64(sum[half], product);
      if (target != nullptr)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(target + kStripe * n + 32 * half), value);
    }
  }
  _mm256_storeu_si256(state, sum[0]);
  _mm256_storeu_si256(state + 1, sum[1]);
}

__attribute__((target("avx512f"))) void stripes_avx512(uint64_t* sums, const uint8_t* data,
                                                       uint8_t* target, int64_t first,
                                                       int64_t count) {
  __m512i sum = _mm512_loadu_si512(sums);
  for (int64_t n = 0; n < count; ++n) {
    const uint8_t* at = data + kStripe * n;
    _mm_prefetch(reinterpret_cast<const char*>(at + kAhead), _MM_HINT_T0);
    const __m512i value = _mm512_loadu_si512(at);
    const __m512i key = _mm512_xor_si512(value, _mm512_loadu_si512(kSecret + 8 * (first + n)));
    const __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
    sum = _mm512_add_epi64(sum, _mm512_shuffle_epi32(value, _MM_PERM_BADC));
    sum = _mm512_add_epi64(sum, product);
    if (target != nullptr)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(target + kStripe * n), value);
  }
  _mm512_storeu_si512(sums, sum);
}
#endif

struct Variant {
  const char* name;
  Stripes stripes;
};

// The first that this CPU can run is taken.
const Variant variants[] = {
#if defined(__x86_64__)
    {"avx512", stripes_avx512},
    {"avx2", stripes_avx2},
#endif
    {"baseline", stripes_baseline},
};

bool runs(const Variant& variant) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (variant.stripes == stripes_avx512) return __builtin_cpu_supports("avx512f");
  if (variant.stripes == stripes_avx2) return __builtin_cpu_supports("avx2");
#endif
  return variant.stripes == stripes_baseline;
}

const Variant* best() {
  for (const Variant& variant : variants)
    if (runs(variant)) return &variant;
  return nullptr;  // the baseline always runs
}

const Variant* chosen = best();

// So many stripes, the first of which has this number; blocks end with a scramble.
void run(uint64_t* sums, const uint8_t* data, uint8_t* target, int64_t number, int64_t count) {
  // What stores around the caches wants its target aligned.
  const bool apart = reinterpret_cast<uintptr_t>(target) % kStripe != 0;
  while (count > 0) {
    const int64_t first = number % kStripes;
    const int64_t some = count < kStripes - first ? count : kStripes - first;
    if (apart) std::memcpy(target, data, static_cast<size_t>(kStripe * some));
    chosen->stripes(sums, apart ? target : data, apart ? nullptr : target, first, some);
    if (first + some == kStripes) scramble(sums);
    data += kStripe * some;
    if (target != nullptr) target += kStripe * some;
    number += some;
    count -= some;
  }
}

void add(PdChecksum* c, const PdPiece& piece) {
  if (piece.size == 0) return;
  const int64_t done = static_cast<int64_t>(c->length) / kStripe;
  if (done > 0) run(c->sums, c->held, nullptr, done - 1, 1);
  const int64_t count = piece.size / kStripe - 1;
  run(c->sums, piece.source, piece.target, done, count);
  std::memcpy(c->held, piece.source + kStripe * count, kStripe);
  if (piece.target != nullptr) std::memcpy(piece.target + kStripe * count, c->held, kStripe);
  c->length += static_cast<uint64_t>(piece.size);
}

uint64_t folded(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

#define PD_API extern "C" __attribute__((visibility("default")))

PD_API int32_t pd_checksum_abi() { return 1; }

PD_API const char* pd_checksum_variant() { return chosen->name; }

// For tests: another variant from now on. 0 when this CPU can't run it or it isn't there.
PD_API int32_t pd_checksum_use(const char* name) {
  for (const Variant& variant : variants) {
    if (std::strcmp(variant.name, name) == 0 && runs(variant)) {
      chosen = &variant;
      return 1;
    }
  }
  return 0;
}

PD_API void pd_checksum_begin(PdChecksum* c) {
  const uint64_t start[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                             kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  std::memcpy(c->sums, start, sizeof start);
  c->length = 0;
}

PD_API void pd_checksum_add(PdChecksum* c, const PdPiece* pieces, int32_t count) {
  for (int32_t i = 0; i < count; ++i) add(c, pieces[i]);
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Of more than 240 bytes.
PD_API uint64_t pd_checksum_end(const PdChecksum* c) {
  uint64_t sums[8];
  std::memcpy(sums, c->sums, sizeof sums);
  accumulate(sums, c->held, kSecret + sizeof kSecret - kStripe - 7);
  uint64_t hash = c->length * kPrime64_1;
  for (int i = 0; i < 4; ++i)
    hash += folded(sums[2 * i] ^ read64(kSecret + 11 + 16 * i),
                   sums[2 * i + 1] ^ read64(kSecret + 11 + 16 * i + 8));
  hash ^= hash >> 37;
  hash *= kAvalanche;
  return hash ^ (hash >> 32);
}
