/* The figures of numbers, and those of them that are sums. */

#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define FAST __attribute__((target("avx2,fma,f16c")))

typedef struct {
    uint64_t finite, nan, pos_inf, neg_inf, zeros, subnormals, overflowing, vanishing;
    int64_t first; /* the index of the first number that is not finite, or -1 */
    double minimum, maximum, sum, squares; /* of the finite numbers */
} Figures;

/* What is found in few numbers: `least` is the least magnitude, `top` the greatest number as unsigned, `above` as
   signed. The sums have a meaning where all numbers are within bounds. */
typedef struct {
    uint32_t least, top;
    int32_t above;
    double sum, squares;
} Chunk;

FAST static inline __m256d four_float32(const uint32_t *p) { return _mm256_cvtps_pd(_mm_loadu_ps((const float *)p)); }

/* Sixteen numbers as two times eight, in any order: neither sum depends on it but for its last bits. */
FAST static inline void sixteen_float16(const uint16_t *p, __m256 *a, __m256 *b)
{
    *a = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
    *b = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)));
}

/* Two bfloat16 are in 32 bits; the upper one needs a mask alone, the lower one a shift, to be a float32. */
FAST static inline void sixteen_bfloat16(const uint16_t *p, __m256 *a, __m256 *b)
{
    __m256i pairs = _mm256_loadu_si256((const __m256i *)p);
    *a = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000u)));
    *b = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}

static inline double float32_value(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

FAST static inline double float16_value(uint16_t bits) { return _cvtsh_ss(bits); }

static inline double bfloat16_value(uint16_t bits) { return float32_value((uint32_t)bits << 16); }

FAST static inline double total(__m256d a, __m256d b)
{
    double parts[4];
    _mm256_storeu_pd(parts, _mm256_add_pd(a, b));
    return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

FAST __attribute__((always_inline)) static inline void float32_sum(const uint32_t *p, size_t count, Chunk *chunk)
{
    __m256d s0 = _mm256_setzero_pd(), s1 = s0, s2 = s0, s3 = s0, q0 = s0, q1 = s0, q2 = s0, q3 = s0;
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m256d a = four_float32(p + i), b = four_float32(p + i + 4);
        __m256d c = four_float32(p + i + 8), d = four_float32(p + i + 12);
        s0 = _mm256_add_pd(s0, a), q0 = _mm256_fmadd_pd(a, a, q0);
        s1 = _mm256_add_pd(s1, b), q1 = _mm256_fmadd_pd(b, b, q1);
        s2 = _mm256_add_pd(s2, c), q2 = _mm256_fmadd_pd(c, c, q2);
        s3 = _mm256_add_pd(s3, d), q3 = _mm256_fmadd_pd(d, d, q3);
    }
    double sum = total(_mm256_add_pd(s0, s1), _mm256_add_pd(s2, s3));
    double squares = total(_mm256_add_pd(q0, q1), _mm256_add_pd(q2, q3));
    for (; i < count; i++) {
        double value = float32_value(p[i]);
        sum += value, squares += value * value;
    }
    chunk->sum = sum, chunk->squares = squares;
}

/* Of numbers of 16 bits, the square of one is exact as a float32. Eight at a time are added as such, and what comes out
   as float64. That rounds by three parts in ten millions at most, and by nothing where the numbers are of about one
   size. */
#define SUM_OF_HALVES(NAME)                                                                                            \
    FAST static void NAME##_sum(const uint16_t *p, size_t count, Chunk *chunk)                                         \
    {                                                                                                                  \
        __m256d s0 = _mm256_setzero_pd(), s1 = s0, q0 = s0, q1 = s0;                                                   \
        size_t i = 0;                                                                                                  \
        for (; i + 64 <= count; i += 64) {                                                                             \
            __m256 s = _mm256_setzero_ps(), q = s, a, b;                                                               \
            for (int j = 0; j < 64; j += 16) {                                                                         \
                sixteen_##NAME(p + i + j, &a, &b);                                                                     \
                s = _mm256_add_ps(s, _mm256_add_ps(a, b));                                                             \
                q = _mm256_add_ps(q, _mm256_fmadd_ps(a, a, _mm256_mul_ps(b, b)));                                      \
            }                                                                                                          \
            s0 = _mm256_add_pd(s0, _mm256_cvtps_pd(_mm256_castps256_ps128(s)));                                        \
            s1 = _mm256_add_pd(s1, _mm256_cvtps_pd(_mm256_extractf128_ps(s, 1)));                                      \
            q0 = _mm256_add_pd(q0, _mm256_cvtps_pd(_mm256_castps256_ps128(q)));                                        \
            q1 = _mm256_add_pd(q1, _mm256_cvtps_pd(_mm256_extractf128_ps(q, 1)));                                      \
        }                                                                                                              \
        double sum = total(s0, s1), squares = total(q0, q1);                                                           \
        for (; i < count; i++) {                                                                                       \
            double value = NAME##_value(p[i]);                                                                         \
            sum += value, squares += value * value;                                                                    \
        }                                                                                                              \
        chunk->sum = sum, chunk->squares = squares;                                                                    \
    }

SUM_OF_HALVES(float16)
SUM_OF_HALVES(bfloat16)
