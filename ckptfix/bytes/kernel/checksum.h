/* The CRC-32 of zip and gzip, by the processor's multiplication without carries.

   A CRC is the remainder of the bytes, read as one long polynomial, by x^32 + x^26 + ... + 1. Sixteen bytes that stand
   n bits ahead of others may be replaced by their product with the remainder of x^n, which is short, and added to them.
   So eight streams of sixteen bytes run to the end, two or four of them in a register, are folded into one, and the
   remainder of that is taken bit by bit. All is written with the bits of a byte in the order of zip, the highest power
   first. */

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define FOLDING __attribute__((target("avx2,pclmul,vpclmulqdq")))
#define WIDE_FOLDING __attribute__((target("avx512f,pclmul,vpclmulqdq")))

int ckptfix_is_wide; /* whether the processor has AVX-512; a test may say that it has not */

#define STREAMS 128 /* bytes of the eight streams */

/* The remainders of x^(n + 32) and x^(n - 32), for n of 1024 and of 128 bits: the lower and the upper half of a product. */
static const uint64_t by_eight[2] = {0x1e88ef372, 0x14a7fe880}, by_one[2] = {0x1751997d0, 0x0ccaa009e};

/* The remainder by the polynomial, one bit after the other. */
static uint32_t checksum_slowly(uint32_t rest, const uint8_t *p, size_t length)
{
    for (size_t i = 0; i < length; i++) {
        rest ^= p[i];
        for (int bit = 0; bit < 8; bit++)
            rest = rest >> 1 ^ (rest & 1 ? 0xedb88320u : 0);
    }
    return rest;
}

FOLDING static inline __m128i folded(__m128i ahead, __m128i powers, __m128i there)
{
    __m128i low = _mm_clmulepi64_si128(ahead, powers, 0x00), high = _mm_clmulepi64_si128(ahead, powers, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), there);
}

FOLDING static inline __m256i folded_two(__m256i ahead, __m256i powers, __m256i there)
{
    __m256i low = _mm256_clmulepi64_epi128(ahead, powers, 0x00), high = _mm256_clmulepi64_epi128(ahead, powers, 0x11);
    return _mm256_xor_si256(_mm256_xor_si256(low, high), there);
}

WIDE_FOLDING static inline __m512i folded_four(__m512i ahead, __m512i powers, __m512i there)
{
    __m512i low = _mm512_clmulepi64_epi128(ahead, powers, 0x00), high = _mm512_clmulepi64_epi128(ahead, powers, 0x11);
    return _mm512_xor_si512(_mm512_xor_si512(low, high), there);
}

/* The streams, moved to the end of so many times `STREAMS` bytes. */
FOLDING static void run(uint8_t *streams, const uint8_t *p, size_t times)
{
    const __m256i powers = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)by_eight));
    __m256i f[4];
    for (int i = 0; i < 4; i++)
        f[i] = _mm256_loadu_si256((const __m256i *)streams + i);
    for (; times; times--, p += STREAMS)
        for (int i = 0; i < 4; i++)
            f[i] = folded_two(f[i], powers, _mm256_loadu_si256((const __m256i *)p + i));
    for (int i = 0; i < 4; i++)
        _mm256_storeu_si256((__m256i *)streams + i, f[i]);
}

WIDE_FOLDING static void run_wide(uint8_t *streams, const uint8_t *p, size_t times)
{
    const __m512i powers = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)by_eight));
    __m512i a = _mm512_loadu_si512(streams), b = _mm512_loadu_si512(streams + 64);
    for (; times; times--, p += STREAMS) {
        a = folded_four(a, powers, _mm512_loadu_si512(p));
        b = folded_four(b, powers, _mm512_loadu_si512(p + 64));
    }
    _mm512_storeu_si512(streams, a);
    _mm512_storeu_si512(streams + 64, b);
}

FOLDING static uint32_t checksum(uint32_t crc, const uint8_t *p, size_t length)
{
    uint32_t rest = ~crc;
    if (length >= STREAMS) {
        uint8_t streams[STREAMS];
        for (int i = 0; i < STREAMS; i++)
            streams[i] = i < 4 ? p[i] ^ (uint8_t)(rest >> (8 * i)) : p[i];
        size_t times = length / STREAMS - 1;
        (ckptfix_is_wide ? run_wide : run)(streams, p + STREAMS, times);
        p += (times + 1) * STREAMS, length -= (times + 1) * STREAMS;
        const __m128i powers = _mm_loadu_si128((const __m128i *)by_one);
        __m128i end = _mm_setzero_si128();
        for (int i = 0; i < 8; i++)
            end = folded(end, powers, _mm_loadu_si128((const __m128i *)streams + i));
        uint8_t last[16];
        _mm_storeu_si128((__m128i *)last, end);
        rest = checksum_slowly(0, last, 16);
    }
    return ~checksum_slowly(rest, p, length);
}
