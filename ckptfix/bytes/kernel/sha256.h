/* The SHA-256 of two files at a time, by the processor's own instructions for it (FIPS 180-4).

   Each step of a hash waits for the one before, some four cycles for an instruction that could begin every other cycle.
   The steps of a second hash fill these gaps: two take little longer than one. */

#include <cpuid.h>
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#define HASHING __attribute__((target("sha,sse4.1")))
#define BLOCK 64 /* bytes of a step of the hash */
#define WINDOW ((size_t)4 << 20) /* bytes of a file whose pages are held at a time */

static const uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

/* The eight words of a hash as the instructions want them: A, B, E, F in one register, C, D, G, H in the other. */
typedef struct {
    __m128i abef, cdgh;
} Hash;

/* NAME(hashes, bytes, blocks): goes on with COUNT hashes, each over as many blocks of its own bytes. */
#define HASH_BLOCKS(NAME, COUNT)                                                                                       \
    HASHING static void NAME(Hash *hashes, const uint8_t *const *bytes, size_t blocks)                                 \
    {                                                                                                                  \
        const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);                             \
        __m128i abef[COUNT], cdgh[COUNT], words[COUNT][4];                                                             \
        for (int n = 0; n < COUNT; n++)                                                                                \
            abef[n] = hashes[n].abef, cdgh[n] = hashes[n].cdgh;                                                        \
        for (size_t block = 0; block < blocks; block++) {                                                              \
            for (int n = 0; n < COUNT; n++)                                                                            \
                for (int i = 0; i < 4; i++)                                                                            \
                    words[n][i] = _mm_shuffle_epi8(                                                                    \
                        _mm_loadu_si128((const __m128i *)(bytes[n] + block * BLOCK) + i), big_endian);                 \
            _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++)                                                      \
            {                                                                                                          \
                const __m128i constants = _mm_loadu_si128((const __m128i *)round_constants + i);                       \
                for (int n = 0; n < COUNT; n++) {                                                                      \
                    __m128i *w = words[n], four = _mm_add_epi32(w[i % 4], constants);                                  \
                    cdgh[n] = _mm_sha256rnds2_epu32(cdgh[n], abef[n], four);                                           \
                    abef[n] = _mm_sha256rnds2_epu32(abef[n], cdgh[n], _mm_shuffle_epi32(four, 0x0e));                  \
                    if (i < 12) {                                                                                      \
                        __m128i sum = _mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]);                                  \
                        sum = _mm_add_epi32(sum, _mm_alignr_epi8(w[(i + 3) % 4], w[(i + 2) % 4], 4));                  \
                        w[i % 4] = _mm_sha256msg2_epu32(sum, w[(i + 3) % 4]);                                          \
                    }                                                                                                  \
                }                                                                                                      \
            }                                                                                                          \
            for (int n = 0; n < COUNT; n++) {                                                                          \
                hashes[n].abef = abef[n] = _mm_add_epi32(abef[n], hashes[n].abef);                                     \
                hashes[n].cdgh = cdgh[n] = _mm_add_epi32(cdgh[n], hashes[n].cdgh);                                     \
            }                                                                                                          \
        }                                                                                                              \
    }

HASH_BLOCKS(hash_one, 1)
HASH_BLOCKS(hash_two, 2)

/* The digest: of what was hashed, of what is left of `length` bytes behind the last whole block, and of the length. */
HASHING static void finish(Hash *hash, const uint8_t *bytes, size_t length, uint8_t *digest)
{
    uint8_t last[2 * BLOCK] = {0};
    const uint8_t *padded = last;
    size_t rest = length % BLOCK, blocks = rest < BLOCK - 8 ? 1 : 2;
    memcpy(last, bytes + length - rest, rest);
    last[rest] = 0x80;
    for (size_t i = 0; i < 8; i++)
        last[blocks * BLOCK - 1 - i] = (uint8_t)((uint64_t)length * 8 >> 8 * i);
    hash_one(hash, &padded, blocks);
    uint32_t words[8]; /* F, E, B, A, H, G, D, C */
    _mm_storeu_si128((__m128i *)words, hash->abef);
    _mm_storeu_si128((__m128i *)words + 1, hash->cdgh);
    static const int order[8] = {3, 2, 7, 6, 1, 0, 5, 4};
    for (int i = 0; i < 8; i++)
        for (int byte = 0; byte < 4; byte++)
            digest[4 * i + byte] = (uint8_t)(words[order[i]] >> (24 - 8 * byte));
}

/* The whole blocks of a window. */
static size_t blocks_in(size_t length, size_t start)
{
    size_t rest = length > start ? length - start : 0;
    return (rest < WINDOW ? rest : WINDOW) / BLOCK;
}

/* Of two files that are mapped privately, and of which nothing was changed there. */
HASHING static void sha256_of_two(const uint8_t *const *bytes, const size_t *lengths, uint8_t *digests)
{
    const Hash begin = {_mm_set_epi32(0x6a09e667, (int)0xbb67ae85, 0x510e527f, (int)0x9b05688c),
                        _mm_set_epi32(0x3c6ef372, (int)0xa54ff53a, 0x1f83d9ab, 0x5be0cd19)};
    Hash hashes[2] = {begin, begin};
    size_t done = 0, longer = lengths[0] > lengths[1] ? lengths[0] : lengths[1];
    for (; done < longer; done += WINDOW) {
        const uint8_t *here[2];
        for (int n = 0; n < 2; n++)
            here[n] = bytes[n] + (done < lengths[n] ? done : lengths[n]);
        size_t blocks[2] = {blocks_in(lengths[0], done), blocks_in(lengths[1], done)};
        size_t both = blocks[0] < blocks[1] ? blocks[0] : blocks[1];
        hash_two(hashes, here, both);
        for (int n = 0; n < 2; n++) {
            const uint8_t *rest = here[n] + both * BLOCK;
            hash_one(hashes + n, &rest, blocks[n] - both);
            if (lengths[n] > done + WINDOW) /* the pages of a mapped file that is larger than memory */
                madvise((void *)here[n], WINDOW, MADV_DONTNEED);
        }
    }
    for (int n = 0; n < 2; n++)
        finish(hashes + n, bytes[n], lengths[n], digests + 32 * n);
}

static int has_sha_instructions(void)
{
    unsigned a, b, c, d;
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.1") && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1);
}
