/* A look at float32 on processors with AVX-512: what sums.h and kernel.c do in two passes over a chunk is one here, for
   which the registers of AVX2 are too few. */

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#include "sums.h"

#define WIDE __attribute__((target("avx512f,avx512dq,avx2,fma,f16c")))

WIDE static inline __m512d eight_float32(const uint32_t *p) { return _mm512_cvtps_pd(_mm256_loadu_ps((const float *)p)); }

WIDE static inline double wide_total(__m512d a, __m512d b, __m512d c, __m512d d)
{
    return _mm512_reduce_add_pd(_mm512_add_pd(_mm512_add_pd(a, b), _mm512_add_pd(c, d)));
}

WIDE static void wide_float32_look(const uint32_t *p, size_t count, Chunk *chunk)
{
    const __m512i magnitudes = _mm512_set1_epi32(0x7fffffff);
    __m512i least = magnitudes, top = _mm512_setzero_si512(), above = _mm512_set1_epi32((int)0x80000000u);
    __m512d s0 = _mm512_setzero_pd(), s1 = s0, s2 = s0, s3 = s0, q0 = s0, q1 = s0, q2 = s0, q3 = s0;
    size_t i = 0;
    for (; i + 32 <= count; i += 32) {
        __m512i x = _mm512_loadu_si512(p + i), y = _mm512_loadu_si512(p + i + 16);
        least = _mm512_min_epu32(least, _mm512_and_si512(x, magnitudes));
        least = _mm512_min_epu32(least, _mm512_and_si512(y, magnitudes));
        top = _mm512_max_epu32(_mm512_max_epu32(top, x), y);
        above = _mm512_max_epi32(_mm512_max_epi32(above, x), y);
        __m512d a = eight_float32(p + i), b = eight_float32(p + i + 8);
        __m512d c = eight_float32(p + i + 16), d = eight_float32(p + i + 24);
        s0 = _mm512_add_pd(s0, a), q0 = _mm512_fmadd_pd(a, a, q0);
        s1 = _mm512_add_pd(s1, b), q1 = _mm512_fmadd_pd(b, b, q1);
        s2 = _mm512_add_pd(s2, c), q2 = _mm512_fmadd_pd(c, c, q2);
        s3 = _mm512_add_pd(s3, d), q3 = _mm512_fmadd_pd(d, d, q3);
    }
    Chunk found = {_mm512_reduce_min_epu32(least), _mm512_reduce_max_epu32(top), _mm512_reduce_max_epi32(above),
                   wide_total(s0, s1, s2, s3), wide_total(q0, q1, q2, q3)};
    for (; i < count; i++) {
        uint32_t magnitude = p[i] & 0x7fffffffu;
        found.least = magnitude < found.least ? magnitude : found.least;
        found.top = p[i] > found.top ? p[i] : found.top;
        found.above = (int32_t)p[i] > found.above ? (int32_t)p[i] : found.above;
        double value = float32_value(p[i]);
        found.sum += value, found.squares += value * value;
    }
    *chunk = found;
}

/* It has added them up. */
static inline void wide_float32_sum(const uint32_t *p, size_t count, Chunk *chunk) { (void)p, (void)count, (void)chunk; }
