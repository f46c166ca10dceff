/* The figures of a block of numbers, for processors with AVX2 (and, faster, AVX-512).

   What portable.py does in some eight passes of numpy is done here in one, at about the rate at which memory is read.
   Neither includes Python nor needs it: kernel.py calls it by ctypes, and without it numpy does the work.

   The bits of an IEEE float without the sign are ordered as the magnitudes are. So three integers tell nearly
   everything of a chunk: the greatest as signed (the maximum, if one is positive), the greatest as unsigned (the
   minimum, if one is negative), and the least without the sign (zeros and subnormals; the other extremum where all
   have one sign). What they tell to be rare is counted apart. Sums are those of float64, in which the square of a
   float32 is exact.

   Whatever has a checksum is proved by the same library while it is in the cache: see checksum.h. And whole files are
   hashed by it, two at a time: see sha256.h.

   A mapped file that shrinks while it is read ends the call with an error, and not the process: see guard.h. */

#define _GNU_SOURCE
#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checksum.h"
#include "copy.h"
#include "guard.h"
#include "sha256.h"
#include "sums.h"
#include "wide.h"

#define INTERFACE 5 /* as in compiled.py: raise both with every change of what they share */
#define CHUNK 4096 /* numbers that stay in the first-level cache; 16-bit counters must hold so many */
#define PIECE (1 << 18) /* bytes that stay in the second-level cache, for those who look at them twice */

typedef struct {
    double vanishing, largest; /* of a cast, as in narrowing.py */
    int wanted;
} Cast;

/* NAME_look(numbers, count, chunk): all of a chunk but the sums, which NAME_sum works out. */
#define LOOK(NAME, UNSIGNED, SIGNED)                                                                                   \
    FAST static void NAME##_look(const UNSIGNED *p, size_t count, Chunk *chunk)                                        \
    {                                                                                                                  \
        const UNSIGNED sign = (UNSIGNED)((uint64_t)1 << (8 * sizeof(UNSIGNED) - 1));                                   \
        UNSIGNED least = (UNSIGNED)~sign, top = 0;                                                                     \
        SIGNED above = (SIGNED)sign;                                                                                   \
        for (size_t i = 0; i < count; i++) {                                                                           \
            UNSIGNED magnitude = p[i] & (UNSIGNED)~sign;                                                               \
            least = magnitude < least ? magnitude : least;                                                             \
            top = p[i] > top ? p[i] : top;                                                                             \
            above = (SIGNED)p[i] > above ? (SIGNED)p[i] : above;                                                       \
        }                                                                                                              \
        chunk->least = least, chunk->top = top, chunk->above = above;                                                  \
    }

LOOK(float32, uint32_t, int32_t)
LOOK(float16, uint16_t, int16_t)
LOOK(bfloat16, uint16_t, int16_t)

/* NAME_scan(numbers, start, stop, cast, figures): UNSIGNED and SIGNED are the integers of the size, NORMAL and INFINITE
   the bits of the least normal number and of infinity. Where the largest magnitude is below SMALL or from LARGE on,
   float32 might not hold a square. */
#define SCAN(NAME, TARGET, UNSIGNED, SIGNED, NORMAL, INFINITE, SMALL, LARGE)                                           \
    enum { NAME##_SIGN = 8 * sizeof(UNSIGNED) - 1 };                                                                   \
    static const UNSIGNED NAME##_magnitude = (UNSIGNED)(((uint64_t)1 << NAME##_SIGN) - 1);                             \
                                                                                                                       \
    /* One number after the other, where some of them are out of bounds. */                                            \
    TARGET static void NAME##_sort_out(const UNSIGNED *p, size_t count, int64_t position, Figures *f)                  \
    {                                                                                                                  \
        for (size_t i = 0; i < count; i++) {                                                                           \
            UNSIGNED magnitude = p[i] & NAME##_magnitude;                                                              \
            if (magnitude < INFINITE) {                                                                                \
                double value = NAME##_value(p[i]);                                                                     \
                f->minimum = value < f->minimum ? value : f->minimum;                                                  \
                f->maximum = value > f->maximum ? value : f->maximum;                                                  \
                f->sum += value, f->squares += value * value, f->finite++;                                             \
                continue;                                                                                              \
            }                                                                                                          \
            f->first = f->first < 0 ? position + (int64_t)i : f->first;                                                \
            *(magnitude > INFINITE ? &f->nan : p[i] >> NAME##_SIGN ? &f->neg_inf : &f->pos_inf) += 1;                  \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    TARGET static void NAME##_count_losses(const UNSIGNED *p, size_t count, const Cast *cast, Figures *f)              \
    {                                                                                                                  \
        for (size_t i = 0; i < count; i++) {                                                                           \
            UNSIGNED magnitude = p[i] & NAME##_magnitude;                                                              \
            double value = NAME##_value(magnitude);                                                                    \
            f->vanishing += magnitude != 0 && value <= cast->vanishing;                                                \
            f->overflowing += magnitude < INFINITE && value > cast->largest;                                           \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    TARGET static void NAME##_scan(const void *numbers, size_t start, size_t stop, const Cast *cast, Figures *f)       \
    {                                                                                                                  \
        for (size_t position = start; position < stop; position += CHUNK) {                                            \
            const UNSIGNED *p = (const UNSIGNED *)numbers + position;                                                  \
            size_t count = stop - position < CHUNK ? stop - position : CHUNK;                                          \
            Chunk chunk;                                                                                               \
            NAME##_look(p, count, &chunk);                                                                             \
            UNSIGNED least = (UNSIGNED)chunk.least, top = (UNSIGNED)chunk.top;                                         \
            SIGNED above = (SIGNED)chunk.above;                                                                        \
            UNSIGNED high = above < 0 ? 0 : (UNSIGNED)above, low = top >> NAME##_SIGN ? top & NAME##_magnitude : 0;    \
            UNSIGNED largest = high > low ? high : low;                                                                \
            if (least < NORMAL) {                                                                                      \
                UNSIGNED zeros = 0, small = 0; /* as narrow as the numbers, so that as many are counted at a time */   \
                for (size_t i = 0; i < count; i++)                                                                     \
                    small += (UNSIGNED)(p[i] & NAME##_magnitude) < NORMAL;                                             \
                for (size_t i = 0; least == 0 && i < count; i++)                                                       \
                    zeros += (UNSIGNED)(p[i] & NAME##_magnitude) == 0;                                                 \
                f->zeros += zeros, f->subnormals += (UNSIGNED)(small - zeros);                                         \
            }                                                                                                          \
            if (cast->wanted                                                                                           \
                && (NAME##_value(least) <= cast->vanishing || largest >= INFINITE                                      \
                    || NAME##_value(largest) > cast->largest))                                                         \
                NAME##_count_losses(p, count, cast, f);                                                                \
            if (largest >= LARGE || (largest && largest < SMALL)) {                                                    \
                NAME##_sort_out(p, count, (int64_t)position, f);                                                       \
                continue;                                                                                              \
            }                                                                                                          \
            double minimum = top >> NAME##_SIGN ? NAME##_value(top) : NAME##_value(least);                             \
            double maximum = above < 0 ? -NAME##_value(least) : NAME##_value((UNSIGNED)above);                         \
            f->minimum = minimum < f->minimum ? minimum : f->minimum;                                                  \
            f->maximum = maximum > f->maximum ? maximum : f->maximum;                                                  \
            f->finite += count;                                                                                        \
            NAME##_sum(p, count, &chunk);                                                                              \
            f->sum += chunk.sum, f->squares += chunk.squares;                                                          \
        }                                                                                                              \
    }

static inline double wide_float32_value(uint32_t bits) { return float32_value(bits); }

SCAN(float32, FAST, uint32_t, int32_t, 0x00800000u, 0x7f800000u, 0, 0x7f800000u)
SCAN(wide_float32, WIDE, uint32_t, int32_t, 0x00800000u, 0x7f800000u, 0, 0x7f800000u)
SCAN(float16, FAST, uint16_t, int16_t, 0x0400u, 0x7c00u, 0, 0x7c00u)
SCAN(bfloat16, FAST, uint16_t, int16_t, 0x0080u, 0x7f80u, 0x2400u, 0x5d80u)

/* Adds up how often each byte is there. Four tables: adding to one entry twice in a row has to wait for the first. */
static void count_bytes(const uint8_t *bytes, size_t length, uint64_t *counts)
{
    while (length) {
        uint32_t tables[4][256] = {{0}};
        size_t count = length < (1u << 31) ? length : (1u << 31), i = 0;
        for (; i + 8 <= count; i += 8) {
            uint64_t word;
            memcpy(&word, bytes + i, sizeof word);
            for (int place = 0; place < 8; place++)
                tables[place & 3][(word >> (8 * place)) & 0xff]++;
        }
        for (; i < count; i++)
            tables[0][bytes[i]]++;
        for (int code = 0; code < 256; code++)
            counts[code] += (uint64_t)tables[0][code] + tables[1][code] + tables[2][code] + tables[3][code];
        bytes += count, length -= count;
    }
}

/* The index of the first byte of those that stand for no finite number, or -1. */
static int64_t first_of(const uint8_t *bytes, size_t length, const uint64_t *counts, const uint8_t *strange)
{
    uint64_t found = 0;
    for (int code = 0; code < 256; code++)
        found += strange[code] ? counts[code] : 0;
    for (size_t i = 0; found && i < length; i++)
        if (strange[bytes[i]])
            return (int64_t)i;
    return -1;
}

/* Called first. The number of the interface, or 0 where the processor is too old. */
int ckptfix_interface(void)
{
    __builtin_cpu_init();
    int able = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    ckptfix_is_wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
    return able ? INTERFACE : 0;
}

/* `kind`: 0 float32, 1 float16, 2 bfloat16 into `figures`. Numbers lie at a multiple of their size. Or 3: bytes into
   `counts`, and of the figures `first`, which is the first byte that is marked as `strange`. Goes on with the CRC-32 of
   the bytes too, unless `crc` is NULL. Returns 0, or 1 where the memory was gone. */
int ckptfix_scan(int kind, const void *numbers, size_t length, const Cast *cast, Figures *figures, uint64_t *counts,
                 const uint8_t *strange, uint32_t *crc)
{
    void (*const scans[])(const void *, size_t, size_t, const Cast *, Figures *) = {
        ckptfix_is_wide ? wide_float32_scan : float32_scan, float16_scan, bfloat16_scan};
    const size_t size = kind == 0 ? 4 : kind == 3 ? 1 : 2;
    sigjmp_buf here;
    unsigned mode = _mm_getcsr();
    int gone = sigsetjmp(here, 0);
    if (!gone) {
        guard_with(&here);
        _mm_setcsr(0x1f80); /* the processor's default: subnormals are not flushed */
        Figures found = {.first = -1, .minimum = INFINITY, .maximum = -INFINITY};
        for (size_t start = 0; start < length; start += PIECE / size) {
            size_t stop = length - start < PIECE / size ? length : start + PIECE / size;
            const uint8_t *bytes = (const uint8_t *)numbers + start * size;
            if (kind == 3)
                count_bytes(bytes, stop - start, counts);
            else
                scans[kind](numbers, start, stop, cast, &found);
            if (crc)
                *crc = checksum(*crc, bytes, (stop - start) * size);
        }
        if (kind == 3)
            found.first = first_of(numbers, length, counts, strange);
        *figures = found;
    }
    unguard();
    _mm_setcsr(mode);
    return gone;
}

/* A range of a file, of at most PIECE bytes, and what is found in it. `is_read` is 0 where the file did not have it. */
typedef struct {
    int64_t offset;
    uint64_t length; /* in numbers */
    int32_t file, kind, is_summed, is_read;
    uint32_t crc, unused;
    Cast cast;
    Figures figures;
} Range;

static int read_all(const Range *range, char *bytes, size_t length)
{
    for (size_t done = 0; done < length;) {
        ssize_t count = pread(range->file, bytes + done, length - done, range->offset + (int64_t)done);
        if (count <= 0)
            return 0;
        done += (size_t)count;
    }
    return 1;
}

/* Scans many ranges of files one after the other, of the kinds below 3: to map a small one takes longer than to read
   it, and a call for each of them longer than both. */
void ckptfix_scan_ranges(Range *ranges, size_t count)
{
    char *bytes = malloc(PIECE);
    for (Range *range = ranges; bytes && range < ranges + count; range++) {
        size_t length = range->length * (range->kind == 0 ? 4 : 2);
        if (length > PIECE || !read_all(range, bytes, length))
            continue;
        range->is_read = !ckptfix_scan(range->kind, bytes, range->length, &range->cast, &range->figures, NULL,
                                       NULL, range->is_summed ? &range->crc : NULL);
    }
    free(bytes);
}

/* Whether the processor is able to work out checksums. */
int ckptfix_is_summing(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq");
}

/* Goes on with the CRC-32 of zip over more bytes. Returns 0, or 1 where the memory was gone. */
int ckptfix_crc32(const void *bytes, size_t length, uint32_t *crc)
{
    sigjmp_buf here;
    int gone = sigsetjmp(here, 0);
    if (!gone) {
        guard_with(&here);
        *crc = checksum(*crc, bytes, length);
    }
    unguard();
    return gone;
}

/* Copies bytes. Returns 0, or 1 where the memory was gone: then a part of them is there. */
int ckptfix_copy(void *goal, const void *bytes, size_t length)
{
    sigjmp_buf here;
    int gone = sigsetjmp(here, 0);
    if (!gone) {
        guard_with(&here);
        copy(goal, bytes, length);
    }
    unguard();
    return gone;
}

/* Whether the processor is able to hash. */
int ckptfix_is_hashing(void) { return has_sha_instructions(); }

/* Works out the two digests of 32 bytes. Returns 0, or 1 where the memory was gone. */
int ckptfix_sha256_of_two(const uint8_t *const *bytes, const size_t *lengths, uint8_t *digests)
{
    sigjmp_buf here;
    int gone = sigsetjmp(here, 0);
    if (!gone) {
        guard_with(&here);
        sha256_of_two(bytes, lengths, digests);
    }
    unguard();
    return gone;
}
