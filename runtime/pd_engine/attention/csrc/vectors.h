// Vectors of floats by GCC's and Clang's extensions, so that one source serves SSE2, AVX2,
// AVX-512 and NEON. Everything has internal linkage: a template that two variants shared
// would be merged by the linker, and code for the wrong CPU might survive.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int VL = 16, MICRO_ROWS = 8;
#elif defined(__AVX2__)
constexpr int VL = 8, MICRO_ROWS = 4;
#elif defined(__aarch64__)
constexpr int VL = 4, MICRO_ROWS = 8;
#else
constexpr int VL = 4, MICRO_ROWS = 4;
#endif

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));

#define PD_INLINE static inline __attribute__((always_inline))

// Sums live in registers only if the loops over them are unrolled.
#define PD_UNROLL _Pragma("GCC unroll 32")

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

PD_INLINE int min_of(int a, int b) { return a < b ? a : b; }
PD_INLINE int max_of(int a, int b) { return a > b ? a : b; }

PD_INLINE vf splat(float x) {  // not vf{} + x: that is an addition
#if defined(__AVX512F__)
  return vf{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#elif defined(__AVX2__)
  return vf{x, x, x, x, x, x, x, x};
#else
  return vf{x, x, x, x};
#endif
}

PD_INLINE vf load(const float* p) {
  vf r;
  __builtin_memcpy(&r, p, sizeof r);
  return r;
}

PD_INLINE void store(float* p, vf x) { __builtin_memcpy(p, &x, sizeof x); }

PD_INLINE vf select(vi mask, vf a, vf b) { return mask ? a : b; }

PD_INLINE vf vmax(vf a, vf b) { return select(a > b, a, b); }

// ---- the storage types -------------------------------------------------------------

PD_INLINE float widen(float x) { return x; }

PD_INLINE float widen(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float r;
  __builtin_memcpy(&r, &bits, 4);
  return r;
}

PD_INLINE float widen(Float16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const uint32_t exponent = rest & 0x0f800000u;
  float r;
  if (exponent == 0x0f800000u) {  // inf, nan
    const uint32_t bits = sign | rest | 0x7f800000u;
    __builtin_memcpy(&r, &bits, 4);
    return r;
  }
  __builtin_memcpy(&r, &rest, 4);
  r *= 0x1p112f;  // shifts the exponent's bias; right for denormals too
  return sign ? -r : r;
#endif
}

PD_INLINE vf load(const BFloat16* p) {
  vh half;
  __builtin_memcpy(&half, p, sizeof half);
  const vu bits = __builtin_convertvector(half, vu) << 16;
  return reinterpret_cast<vf>(bits);
}

PD_INLINE vf load(const Float16* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<vf>(
      _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__)
  return reinterpret_cast<vf>(
      _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  vf r;
  for (int i = 0; i < VL; ++i) r[i] = widen(p[i]);
  return r;
#endif
}

PD_INLINE void narrow(float x, float* to) { *to = x; }

PD_INLINE void narrow(float x, BFloat16* to) {  // to the nearest, ties to even
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if (x != x) {
    to->bits = 0x7fc0;
    return;
  }
  to->bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

PD_INLINE void narrow(float x, Float16* to) {
#if defined(__F16C__)
  to->bits = static_cast<uint16_t>(_cvtss_sh(x, 0));
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const float size = x < 0 ? -x : x;
  if (!(size < 65520.0f)) {  // rounds to inf, or is nan
    to->bits = static_cast<uint16_t>(sign | (x != x ? 0x7e00u : 0x7c00u));
    return;
  }
  uint32_t rest;
  if (size < 0x1p-14f) {  // a denormal: its bits are a count of 2^-24
    const float shifted = size + 0.5f;
    __builtin_memcpy(&rest, &shifted, 4);
    rest -= 0x3f000000u;
  } else {
    __builtin_memcpy(&rest, &size, 4);
    rest = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
  }
  to->bits = static_cast<uint16_t>(sign | rest);
#endif
}

// ---- functions ---------------------------------------------------------------------

typedef float v4f __attribute__((vector_size(16)));

PD_INLINE v4f fold(vf x) {  // to four partial sums
#if defined(__AVX512F__)
  typedef float v8f __attribute__((vector_size(32)));
  v8f low, high;
  __builtin_memcpy(&low, &x, 32);
  __builtin_memcpy(&high, reinterpret_cast<const char*>(&x) + 32, 32);
  const v8f half = low + high;
  return __builtin_shufflevector(half, half, 0, 1, 2, 3) +
         __builtin_shufflevector(half, half, 4, 5, 6, 7);
#elif defined(__AVX2__)
  return __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
#else
  return x;
#endif
}

// The sums of four vectors.
PD_INLINE v4f totals(v4f a, v4f b, v4f c, v4f d) {
  const v4f ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) +
                 __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const v4f cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) +
                 __builtin_shufflevector(c, d, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) +
         __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

PD_INLINE float total(vf x) {
  const v4f four = fold(x);
  return totals(four, four, four, four)[0];
}

constexpr float LEAST_EXPONENT = -86.0f;  // below it, exp is taken for 0

// Within 2 ulp for x <= 88; exactly 0 far below, so what is masked weighs nothing.
PD_INLINE vf vexp(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vf clamped = vmax(x, splat(LEAST_EXPONENT));
  const vf shifted = clamped * splat(1.44269504088896341f) + magic;
  const vf n = shifted - magic;
  vf r = clamped - n * splat(0.693359375f);
  r = r - n * splat(-2.12194440e-4f);
  vf y = splat(1.9875691500e-4f);
  y = y * r + splat(1.3981999507e-3f);
  y = y * r + splat(8.3334519073e-3f);
  y = y * r + splat(4.1665795894e-2f);
  y = y * r + splat(1.6666665459e-1f);
  y = y * r + splat(5.0000001201e-1f);
  y = y * (r * r) + r + splat(1.0f);
  const vi power = reinterpret_cast<vi>(shifted) << 23;
  const vf scaled = reinterpret_cast<vf>(reinterpret_cast<vi>(y) + power);
  return select(x < splat(LEAST_EXPONENT), vf{}, scaled);
}

PD_INLINE float exp_of(float x) { return vexp(splat(x))[0]; }

// A rational function, within 5 ulp.
PD_INLINE vf vtanh(vf x) {
  const vf most = splat(7.90531110763549805f);
  x = select(x > most, most, select(x < -most, -most, x));
  const vf s = x * x;
  vf p = splat(-2.76076847742355e-16f);
  p = p * s + splat(2.00018790482477e-13f);
  p = p * s + splat(-8.60467152213735e-11f);
  p = p * s + splat(5.12229709037114e-08f);
  p = p * s + splat(1.48572235717979e-05f);
  p = p * s + splat(6.37261928875436e-04f);
  p = p * s + splat(4.89352455891786e-03f);
  vf q = splat(1.19825839466702e-06f);
  q = q * s + splat(1.18534705686654e-04f);
  q = q * s + splat(2.26843463243900e-03f);
  q = q * s + splat(4.89352518554385e-03f);
  return x * p / q;
}

}  // namespace
