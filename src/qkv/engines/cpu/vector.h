/* SIMD vectors with the register width of the target (GCC and Clang vector extensions), and functions on them. */

#ifndef QKV_VECTOR_H
#define QKV_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

/* Micro-kernel tile: TILE_ROWS rows by TILE_VECTORS vectors, so that all accumulators fit in registers. */
#if defined(__AVX512F__)
enum { LANES = 16, TILE_ROWS = 6, TILE_VECTORS = 4 };
#elif defined(__AVX2__)
enum { LANES = 8, TILE_ROWS = 6, TILE_VECTORS = 2 };
#elif defined(__aarch64__)
enum { LANES = 4, TILE_ROWS = 6, TILE_VECTORS = 4 };
#else
enum { LANES = 4, TILE_ROWS = 4, TILE_VECTORS = 2 };
#endif
enum { PANEL = LANES * TILE_VECTORS }; /* output columns of a tile; every width is padded to a multiple of it */

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t VecInt __attribute__((vector_size(4 * LANES)));
typedef uint32_t VecBits __attribute__((vector_size(4 * LANES)));
typedef uint16_t VecBf16 __attribute__((vector_size(2 * LANES)));

#define INLINE static inline __attribute__((always_inline))

INLINE Vec splat(float x) { return x - (Vec){0}; }

INLINE Vec load(const float *from) {
    Vec x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store(float *to, Vec x) { memcpy(to, &x, sizeof x); }

/* bf16 is the upper half of an fp32 number. */
INLINE Vec load_bf16(const uint16_t *from) {
#if defined(__AVX512F__)
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from)), 16);
#endif
    VecBf16 x;
    memcpy(&x, from, sizeof x);
    return (Vec)(__builtin_convertvector(x, VecBits) << 16);
}

INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return 0x7fc0; /* NaN stays NaN: rounding could overflow its bits */
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16); /* round to nearest, ties to even */
}

/* Elementwise maximum; if either operand is NaN, the second operand. */
INLINE Vec vec_max(Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    VecInt first = a > b;
    return (Vec)((first & (VecInt)a) | (~first & (VecInt)b));
#endif
}

INLINE Vec vec_min(Vec a, Vec b) { return -vec_max(-a, -b); }

INLINE Vec vec_abs(Vec x) { return (Vec)((VecBits)x & 0x7fffffffu); }

INLINE float max_over_lanes(Vec x) {
    float result = x[0];
    for (int i = 1; i < LANES; i++) result = x[i] > result ? x[i] : result;
    return result;
}

/* Sums of adjacent lanes, those of a first: even lanes (a₀ a₂ … b₀ b₂ …) + odd lanes (a₁ a₃ … b₁ b₃ …). */
INLINE Vec add_pairs(Vec a, Vec b) {
#if defined(__AVX512F__)
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif defined(__AVX2__)
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#endif
#if defined(__clang__)
    return __builtin_shufflevector(a, b, EVEN) + __builtin_shufflevector(a, b, ODD);
#else
    return __builtin_shuffle(a, b, (VecInt){EVEN}) + __builtin_shuffle(a, b, (VecInt){ODD});
#endif
}

/* Horizontal sums of LANES vectors: lane i of the result is the sum over the lanes of part[i]. */
INLINE Vec sum_lanes_of_each(Vec part[LANES]) {
#pragma GCC unroll 4
    for (int n = LANES; n > 1; n /= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < n / 2; i++) part[i] = add_pairs(part[2 * i], part[2 * i + 1]);
    }
    return part[0];
}

INLINE float sum_over_lanes(Vec x) {
#pragma GCC unroll 4
    for (int n = LANES; n > 1; n /= 2) x = add_pairs(x, x);
    return x[0];
}

/* eˣ to about 2 ulp: 2ⁿ times a Taylor polynomial of an argument in [-ln 2 / 2, ln 2 / 2]. */
INLINE Vec exponential(Vec x) {
    const Vec low = splat(-87.0f), round = splat(12582912.0f); /* adding 1.5 · 2²³ rounds to an integer */
    Vec t = vec_min(splat(88.0f), vec_max(low, x));
    Vec shifted = t * 1.44269504f + round, n = shifted - round;
    Vec r = t - n * 0.693359375f + n * 2.12194440e-4f;
    Vec series = splat(1.0f / 5040);
    series = series * r + 1.0f / 720;
    series = series * r + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 0.5f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    Vec power = (Vec)(((VecBits)shifted << 23) + 0x3f800000u);
    return (Vec)((VecInt)(series * power) & ~(x < low));
}

#endif
