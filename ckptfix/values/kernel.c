/* Computes the statistics of a block of numbers in one pass, at close to memory bandwidth; numpy needs about eight
   passes. It does not use Python: scan.py calls it through ctypes.

   The compiler vectorises these plain loops. On x86-64 it compiles each for several generations of processors, and the
   loader picks one (https://gcc.gnu.org/onlinedocs/gcc/Function-Multiversioning.html).

   Without the sign, the bits of an IEEE float order as its magnitude. So three integers describe a chunk nearly
   completely: the greatest as signed (the maximum, if any number is positive), the greatest as unsigned (the minimum, if
   any is negative), and the least without the sign (zeros and subnormals; the other extremum if all have one sign).
   Rare cases that they reveal are counted separately. Sums are in float64, where the square of a float32 is exact. */

#include <fenv.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INTERFACE 8 /* as in scan.py: raise both when the interface changes */
#define CHUNK 4096  /* numbers; they fit into the L1 cache, and their count into 16 bits */

#if defined(__x86_64__)
#define EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EACH_PROCESSOR
#endif

typedef struct {
    double vanishing, largest; /* of a cast, as in decode.py */
    int wanted;
} Cast;

typedef struct {
    uint64_t finite, nan, pos_inf, neg_inf, zeros, subnormals, overflowing, vanishing;
    int64_t first; /* the index of the first number that is not finite, or -1 */
    double minimum, maximum, sum, squares; /* of the finite numbers */
} Figures;

static inline float float32_value(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Moves exponent and fraction to where a float32 has them; its exponent bias is 112 higher. */
static inline float float16_value(uint16_t bits)
{
    return float32_value(((uint32_t)(int16_t)bits << 13) & 0x8fffe000u) * 0x1p112f;
}

static inline float bfloat16_value(uint16_t bits) { return float32_value((uint32_t)bits << 16); }

/* Marks are words with certain low bits: their offsets, each with a hash of the bytes from there on. A copied block has
   the same marks in both places, whatever its alignment. */
#define PIECE 128  /* words; only the few pieces with a mark are searched word by word */
#define CROWDED 64 /* a mark in every 64 words or fewer comes from repeated numbers, not from a copy */
#define HASHED 16  /* bytes */

typedef struct {
    uint64_t hash, place;
} Mark;

typedef struct {
    uint32_t mask, wanted;
    size_t place, room, found; /* `place` is the offset of the block in the tensor, in bytes */
    Mark *marks;
} Marks;

static inline uint32_t word_at(const uint8_t *bytes, size_t i)
{
    uint32_t word;
    memcpy(&word, bytes + 4 * i, sizeof word);
    return word;
}

static inline uint64_t hash_at(const uint8_t *bytes)
{
    uint64_t words[HASHED / 8];
    memcpy(words, bytes, sizeof words);
    uint64_t mixed = (words[0] * 0x9e3779b97f4a7c15u) ^ (words[1] + 0x632be59bd9b4e019u);
    mixed = (mixed ^ (mixed >> 29)) * 0xbf58476d1ce4e5b9u;
    return mixed ^ (mixed >> 32);
}

/* Counts the words of a chunk of `length` bytes that are marks. */
EACH_PROCESSOR static uint32_t matches(const void *chunk, size_t length, const Marks *m)
{
    const uint32_t mask = m->mask, wanted = m->wanted;
    uint32_t hits = 0;
    for (size_t i = 0; i < length / 4; i++)
        hits += (word_at(chunk, i) & mask) == wanted;
    return hits;
}

/* Stores the `hits` marks of a chunk at offset `place` of the block, in bytes. */
EACH_PROCESSOR static void mark(const void *chunk, size_t length, size_t place, uint32_t hits, Marks *m)
{
    const uint8_t *bytes = chunk;
    const uint32_t mask = m->mask, wanted = m->wanted;
    size_t words = length < HASHED ? 0 : (length - HASHED) / 4 + 1;
    if (!hits || hits > words / CROWDED || m->found + hits > m->room)
        return;
    for (size_t first = 0; hits && first < words; first += PIECE) {
        size_t stop = words - first < PIECE ? words : first + PIECE;
        uint32_t some = 0;
        for (size_t i = first; i < stop; i++)
            some += (word_at(bytes, i) & mask) == wanted;
        hits -= some;
        for (size_t i = first; some; i++)
            if ((word_at(bytes, i) & mask) == wanted)
                m->marks[m->found++] = (Mark){hash_at(bytes + 4 * i), m->place + place + 4 * i}, some--;
    }
}

/* The square of a float32 needs a float64. That of a 16-bit number is exact in float32, and four pairs are summed in
   float32: the relative rounding error is at most 3e-7. */
#define LANES 32 /* parallel sums, in a few registers */

#define SUM_OF_SINGLES                                                                                                 \
    double sums[LANES] = {0}, more[LANES] = {0};                                                                       \
    size_t i = 0;                                                                                                      \
    for (; i + LANES <= count; i += LANES)                                                                             \
        for (int lane = 0; lane < LANES; lane++) {                                                                     \
            double value = float32_value(p[i + lane]);                                                                 \
            sums[lane] += value, more[lane] += value * value;                                                          \
        }                                                                                                              \
    for (int lane = 0; lane < LANES; lane++)                                                                           \
        sum += sums[lane], squares += more[lane];                                                                      \
    for (; i < count; i++) {                                                                                           \
        double value = float32_value(p[i]);                                                                            \
        sum += value, squares += value * value;                                                                        \
    }

#define SUM_OF_HALVES(VALUE)                                                                                           \
    double wide[LANES] = {0}, wider[LANES] = {0};                                                                      \
    size_t i = 0;                                                                                                      \
    for (; i + 8 * LANES <= count; i += 8 * LANES) {                                                                   \
        float sums[LANES] = {0}, more[LANES] = {0};                                                                    \
        for (int j = 0; j < 8 * LANES; j += 2 * LANES)                                                                 \
            for (int lane = 0; lane < LANES; lane++) {                                                                 \
                float one = VALUE(p[i + j + lane]), other = VALUE(p[i + j + LANES + lane]);                            \
                sums[lane] += one + other, more[lane] += one * one + other * other;                                    \
            }                                                                                                          \
        for (int lane = 0; lane < LANES; lane++)                                                                       \
            wide[lane] += sums[lane], wider[lane] += more[lane];                                                       \
    }                                                                                                                  \
    for (int lane = 0; lane < LANES; lane++)                                                                           \
        sum += wide[lane], squares += wider[lane];                                                                     \
    for (; i < count; i++) {                                                                                           \
        double value = VALUE(p[i]);                                                                                    \
        sum += value, squares += value * value;                                                                        \
    }

#define SCAN(NAME, UNSIGNED, SIGNED, NORMAL, INFINITE, SMALL, LARGE, SUM)                                              \
    EACH_PROCESSOR static void NAME##_scan(const UNSIGNED *numbers, size_t length, const Cast *cast, Figures *f,       \
        Marks *marks)                                                                                                  \
    {                                                                                                                  \
        const int sign = 8 * sizeof(UNSIGNED) - 1;                                                                     \
        const UNSIGNED mask = (UNSIGNED)(((uint64_t)1 << sign) - 1);                                                   \
        for (size_t position = 0; position < length; position += CHUNK) {                                              \
            const UNSIGNED *p = numbers + position;                                                                    \
            size_t count = length - position < CHUNK ? length - position : CHUNK;                                      \
            UNSIGNED hits = 0, least = mask, top = 0;                                                                  \
            SIGNED above = (SIGNED)(mask + 1);                                                                         \
            for (size_t i = 0; i < count; i++) {                                                                       \
                UNSIGNED magnitude = p[i] & mask;                                                                      \
                if (sizeof *p == 4) /* a pass of its own would take a tenth longer */  \
                    hits += (p[i] & marks->mask) == marks->wanted;                                                     \
                least = magnitude < least ? magnitude : least;                                                         \
                top = p[i] > top ? p[i] : top;                                                                         \
                above = (SIGNED)p[i] > above ? (SIGNED)p[i] : above;                                                   \
            }                                                                                                          \
            if (marks->room)                                                                                           \
                mark(p, count * sizeof *p, position * sizeof *p,                                                       \
                    sizeof *p == 4 ? hits : matches(p, count * sizeof *p, marks), marks);                              \
            UNSIGNED high = above < 0 ? 0 : (UNSIGNED)above, low = top >> sign ? top & mask : 0;                       \
            UNSIGNED largest = high > low ? high : low;                                                                \
            if (least < NORMAL) {                                                                                      \
                UNSIGNED zeros = 0, small = 0; /* as narrow as the numbers, for full vectors */   \
                for (size_t i = 0; i < count; i++) {                                                                   \
                    small += (UNSIGNED)(p[i] & mask) < NORMAL;                                                         \
                    zeros += (UNSIGNED)(p[i] & mask) == 0;                                                             \
                }                                                                                                      \
                f->zeros += zeros, f->subnormals += (UNSIGNED)(small - zeros);                                         \
            }                                                                                                          \
            if (cast->wanted                                                                                           \
                && (NAME##_value(least) <= cast->vanishing || largest >= INFINITE                                      \
                    || NAME##_value(largest) > cast->largest)) {                                                       \
                for (size_t i = 0; i < count; i++) {                                                                   \
                    UNSIGNED magnitude = p[i] & mask;                                                                  \
                    f->vanishing += magnitude != 0 && NAME##_value(magnitude) <= cast->vanishing;                      \
                    f->overflowing += magnitude < INFINITE && NAME##_value(magnitude) > cast->largest;                 \
                }                                                                                                      \
            }                                                                                                          \
            double sum = 0, squares = 0;                                                                               \
            if (largest >= LARGE || (largest && largest < SMALL)) { /* one by one: some may not be finite or safe to square */  \
                for (size_t i = 0; i < count; i++) {                                                                   \
                    UNSIGNED magnitude = p[i] & mask;                                                                  \
                    if (magnitude < INFINITE) {                                                                        \
                        double value = NAME##_value(p[i]);                                                             \
                        f->minimum = value < f->minimum ? value : f->minimum;                                          \
                        f->maximum = value > f->maximum ? value : f->maximum;                                          \
                        sum += value, squares += value * value, f->finite++;                                           \
                        continue;                                                                                      \
                    }                                                                                                  \
                    f->first = f->first < 0 ? (int64_t)(position + i) : f->first;                                      \
                    *(magnitude > INFINITE ? &f->nan : p[i] >> sign ? &f->neg_inf : &f->pos_inf) += 1;                 \
                }                                                                                                      \
            } else {                                                                                                   \
                double minimum = top >> sign ? NAME##_value(top) : NAME##_value(least);                                \
                double maximum = above < 0 ? -NAME##_value(least) : NAME##_value((UNSIGNED)above);                     \
                f->minimum = minimum < f->minimum ? minimum : f->minimum;                                              \
                f->maximum = maximum > f->maximum ? maximum : f->maximum;                                              \
                f->finite += count;                                                                                    \
                SUM                                                                                                    \
            }                                                                                                          \
            f->sum += sum, f->squares += squares;                                                                      \
        }                                                                                                              \
    }

SCAN(float32, uint32_t, int32_t, 0x00800000u, 0x7f800000u, 0, 0x7f800000u, SUM_OF_SINGLES)
SCAN(float16, uint16_t, int16_t, 0x0400u, 0x7c00u, 0, 0x7c00u, SUM_OF_HALVES(float16_value))
SCAN(bfloat16, uint16_t, int16_t, 0x0080u, 0x7f80u, 0x2400u, 0x5d80u, SUM_OF_HALVES(bfloat16_value))

/* Counts each byte value. Four tables: consecutive additions to one entry would have to wait for each other. */
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

/* Merges a low-rank adapter: weight += (two @ one) * scaling, bit-equal to torch. Each element of the product is summed
   over the rank in order, with fused multiply-adds, as MKL's kernels do for ranks up to 192. Its kernels for Intel
   processors without AVX-512 sum in another order at the edges of a matrix. */
int ckptfix_multiplies_as_torch(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") || (__builtin_cpu_is("amd") && __builtin_cpu_supports("fma"));
#else
    return 0;
#endif
}

#if defined(__x86_64__) /* of a register; gcc would split wider vectors into single numbers */
#define WIDTH 32
#else
#define WIDTH 16
#endif
typedef float Lanes __attribute__((vector_size(WIDTH), aligned(4), may_alias)); /* at any float */

#define ROWS 4      /* of the weight that are computed together, and */
#define STRIP 16    /* of its columns: their sums fit into registers */
#define VECTORS (STRIP * 4 / WIDTH)
#define COLUMNS 512 /* these columns of `one` fit into the L1 cache */

/* Not inlined: the scaling would be fused with the addition to the weight. */
__attribute__((noinline)) EACH_PROCESSOR static void product(const float *const two[ROWS], const float *one, size_t rank,
    size_t columns, float scaling, float change[ROWS][COLUMNS])
{
    for (size_t j = 0; j < columns; j += STRIP) {
        Lanes sums[ROWS][VECTORS] = {0};
        for (size_t k = 0; k < rank; k++) {
            const Lanes *factors = (const Lanes *)(one + j * rank + k * STRIP);
            for (int row = 0; row < ROWS; row++)
                for (int v = 0; v < VECTORS; v++)
                    sums[row][v] += two[row][k] * factors[v];
        }
        for (int row = 0; row < ROWS; row++)
            for (int v = 0; v < VECTORS; v++)
                ((Lanes *)(change[row] + j))[v] = sums[row][v] * scaling;
    }
}

static inline uint32_t float32_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float whole_float16_value(uint16_t bits)
{
    uint32_t infinite = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0;
    return float32_value(float32_bits(float16_value(bits)) | infinite);
}

/* Rounds to nearest, ties to even. */
static inline uint16_t bfloat16_bits(float value)
{
    uint32_t bits = float32_bits(value), rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded;
}

static inline uint16_t float16_bits(float value)
{
    uint32_t bits = float32_bits(value), magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13;
    uint32_t small = float32_bits(float32_value(magnitude) + 0.5f) - 0x3f000000u; /* adding 0.5 rounds subnormals */
    uint32_t large = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    uint32_t found = magnitude < 0x38800000u ? small : magnitude < 0x47800000u ? normal : large;
    return found | (bits >> 16 & 0x8000u);
}

#define AS_IS(VALUE) (VALUE)

#define ADD(NAME, TYPE, VALUE, BITS)                                                                                   \
    EACH_PROCESSOR static void NAME##_add(TYPE *weight, const float *change, size_t count, int rounds)                 \
    {                                                                                                                  \
        if (rounds)                                                                                                    \
            for (size_t i = 0; i < count; i++)                                                                         \
                weight[i] = BITS(VALUE(weight[i]) + VALUE(BITS(change[i])));                                           \
        else                                                                                                           \
            for (size_t i = 0; i < count; i++)                                                                         \
                weight[i] = BITS(VALUE(weight[i]) + change[i]);                                                        \
    }

ADD(float32, float, AS_IS, AS_IS)
ADD(float16, uint16_t, whole_float16_value, float16_bits)
ADD(bfloat16, uint16_t, bfloat16_value, bfloat16_bits)

/* `two` is [rows, rank]; `one` is [strips, rank, STRIP], in reading order and padded with zeros: rows of a plain matrix
   would share few cache lines, which took 1.5 times as long for rank 16. */
void ckptfix_add_product(int kind, void *weight, const float *two, const float *one, size_t rows, size_t width,
    size_t rank, float scaling, int rounds)
{
    fenv_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    float change[ROWS][COLUMNS];
    for (size_t j = 0; j < width; j += COLUMNS) {
        size_t count = width - j < COLUMNS ? width - j : COLUMNS, columns = (count + STRIP - 1) / STRIP * STRIP;
        for (size_t i = 0; i < rows; i += ROWS) {
            const float *some[ROWS];
            for (size_t row = 0; row < ROWS; row++) /* repeats the last one */
                some[row] = two + (i + row < rows ? i + row : rows - 1) * rank;
            product(some, one + j * rank, rank, columns, scaling, change);
            for (size_t row = 0; row < ROWS && i + row < rows; row++) {
                size_t place = (i + row) * width + j;
                if (kind == 0)
                    float32_add((float *)weight + place, change[row], count, 0);
                else if (kind == 1)
                    float16_add((uint16_t *)weight + place, change[row], count, rounds);
                else
                    bfloat16_add((uint16_t *)weight + place, change[row], count, rounds);
            }
        }
    }
    fesetenv(&before);
}

int ckptfix_interface(void) { return INTERFACE; }

/* `kind`: 0 float32, 1 float16, 2 bfloat16. `numbers` must be aligned. */
void ckptfix_scan(int kind, const void *numbers, size_t length, const Cast *cast, Figures *figures,
    Marks *marks)
{
    fenv_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV); /* subnormals must not be flushed, whatever mode the program set */
    Figures found = {.first = -1, .minimum = INFINITY, .maximum = -INFINITY};
    if (kind == 0)
        float32_scan(numbers, length, cast, &found, marks);
    else if (kind == 1)
        float16_scan(numbers, length, cast, &found, marks);
    else
        bfloat16_scan(numbers, length, cast, &found, marks);
    fesetenv(&before);
    *figures = found;
}

/* Counts each of the 256 byte values. */
void ckptfix_count(const uint8_t *bytes, size_t length, uint64_t *counts) { count_bytes(bytes, length, counts); }

/* Finds equal hashes: stores the index of each repeated hash and that of its next occurrence, and returns the number of
   such pairs. Hashes with two equal halves are skipped: they come from repeated numbers. `table` has `slots` zeros, a
   power of two greater than `count`; `pairs` has room for two indices per hash. */
size_t ckptfix_pairs(const uint64_t *hashes, size_t count, uint32_t *table, size_t slots, uint32_t *pairs)
{
    size_t found = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t hash = hashes[i];
        if (hash >> 32 == (hash & 0xffffffffu))
            continue;
        size_t slot = (hash * 0x9e3779b97f4a7c15u) >> 32 & (slots - 1);
        while (table[slot] && hashes[table[slot] - 1] != hash)
            slot = (slot + 1) & (slots - 1);
        if (table[slot])
            pairs[2 * found] = table[slot] - 1, pairs[2 * found + 1] = (uint32_t)i, found++;
        table[slot] = (uint32_t)i + 1; /* the next occurrence is paired with this one */
    }
    return found;
}
