/* The CRC-32 of zip and gzip, by the processor's multiplication without carries.

   A CRC is the remainder of the bytes, read as one long polynomial, by x^32 + x^26 + ... + 1. Sixteen bytes that stand
   n bits ahead of others may be replaced by their product with the remainder of x^n, which is short, and added to them.
   So eight streams of sixteen bytes run to the end, are folded into one, and the remainder of that is taken bit by bit.
   All is written with the bits of a byte in the order of zip, the highest power first. */

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define FOLDING __attribute__((target("avx2,pclmul,vpclmulqdq")))

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

/* `ahead` moved back by the distance that `powers` stands for, and added to what is there: two times sixteen bytes. */
FOLDING static inline __m256i folded(__m256i ahead, __m256i powers, __m256i there)
{
    __m256i low = _mm256_clmulepi64_epi128(ahead, powers, 0x00), high = _mm256_clmulepi64_epi128(ahead, powers, 0x11);
    return _mm256_xor_si256(_mm256_xor_si256(low, high), there);
}

FOLDING static uint32_t checksum(uint32_t crc, const uint8_t *p, size_t length)
{
    /* The remainders of x^(n + 32) and x^(n - 32), for n of 1024 and of 128 bits. */
    const __m256i by_eight = _mm256_set_epi64x(0x14a7fe880, 0x1e88ef372, 0x14a7fe880, 0x1e88ef372);
    const __m256i by_one = _mm256_set_epi64x(0x0ccaa009e, 0x1751997d0, 0x0ccaa009e, 0x1751997d0);
    uint32_t rest = ~crc;
    if (length >= 128) {
        __m256i f[4];
        for (int i = 0; i < 4; i++)
            f[i] = _mm256_loadu_si256((const __m256i *)p + i);
        f[0] = _mm256_xor_si256(f[0], _mm256_set_epi32(0, 0, 0, 0, 0, 0, 0, (int)rest));
        for (p += 128, length -= 128; length >= 128; p += 128, length -= 128)
            for (int i = 0; i < 4; i++)
                f[i] = folded(f[i], by_eight, _mm256_loadu_si256((const __m256i *)p + i));
        __m256i end = _mm256_setzero_si256();
        for (int i = 0; i < 8; i++) { /* the lower halves alone: one stream after the other */
            __m256i next = i & 1 ? _mm256_permute4x64_epi64(f[i / 2], 0xee) : f[i / 2];
            end = folded(end, by_one, next);
        }
        uint8_t last[32];
        _mm256_storeu_si256((__m256i *)last, end);
        rest = checksum_slowly(0, last, 16);
    }
    return ~checksum_slowly(rest, p, length);
}
