/* A copy of many bytes that are not looked at soon: past the caches, which need not read what they would overwrite. */

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

__attribute__((target("avx2"))) static void copy(uint8_t *goal, const uint8_t *p, size_t length)
{
    size_t first = -(uintptr_t)goal % 64; /* stores past the caches are aligned, and fill whole lines */
    if (length < first + 64) {
        memcpy(goal, p, length);
        return;
    }
    memcpy(goal, p, first);
    size_t i = first;
    for (; i + 64 <= length; i += 64) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(p + i)), b = _mm256_loadu_si256((const __m256i *)(p + i + 32));
        _mm256_stream_si256((__m256i *)(goal + i), a);
        _mm256_stream_si256((__m256i *)(goal + i + 32), b);
    }
    _mm_sfence(); /* other threads see them in their order */
    memcpy(goal + i, p + i, length - i);
}
