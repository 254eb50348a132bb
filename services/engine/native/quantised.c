/* Multiplies by weights of 4 or 8 bits: y[rows, out] = x[rows, in] W^T + bias.
 *
 * Inputs are rounded to 8 bits, each group of 32 by its largest, as llama.cpp's Q8_0 does; products within a group are
 * summed in whole numbers, exactly, and groups in float32. So all instruction sets give the same but for the rounding
 * of that last sum, and a row's result does not depend on the rows beside it.
 *
 * Weights lie in panels of 16 output columns. A panel is a row of blocks, one for each group of 32 inputs:
 *   values   8 bits: [8 quads][16 columns][4 inputs], signed. 4 bits: [4][16][4] bytes, unsigned: the low half of byte
 *            [q] is of quad q, the high half of quad q + 4.
 *   scales   [16] for the group, or [2][16] for its halves; float32 or float16.
 *   minimums [16], as scales, if there are any. A weight is scale * value + minimum.
 * Inputs and columns beyond the last are zeros. `services/engine/cpu/quantised_linear.py` writes this form.
 *
 * It is compiled once for each instruction set.
 */
#include "threads.h"
#include "vectors.h"
#include <stdlib.h>

#define COLUMNS 16
#define GROUP 32
#define WIDE 2 /* vectors of columns that are computed together for many rows */
#if LANES == 16
#define ROWS 8 /* rows of a tile of one vector of columns: as many as leave their sums in registers */
#if defined(__AVX512VNNI__)
#define TALL 6 /* rows of a tile of WIDE vectors */
#else
#define TALL 4
#endif
#define BESIDE 0 /* columns from one vector to the next in a panel; 0: the next is in another panel */
#else
#define ROWS 4
#define TALL 2
#define BESIDE LANES
#endif

typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int16_t pairs_of_sums __attribute__((vector_size(4 * LANES), aligned(4)));

typedef struct { /* 32 inputs of one row, rounded */
    int8_t values[GROUP];
    float scale, total; /* total: scale * the sum of the values */
    int32_t offsets[2]; /* -128 * the sum of the values of each half */
} Group;

enum { FOUR, EIGHT, EIGHT_BY_16 }; /* 4 bits; 8 bits; 8 bits with a scale for each half of a group */

typedef struct {
    const void *x;
    void *y;
    const uint8_t *panels;
    const float *bias; /* [out], or null */
    long rows, in, out;
    long block; /* bytes of a block */
    int kind, has_minimums, half_scales; /* half_scales: scales and minimums are float16 */
    int bf16; /* x and y are bfloat16; otherwise float32 */
    int threads;
} Product;

/* -- sums of products in whole numbers ----------------------------------------------------------------------------- */

/* `add4` adds to each lane's sum the products of its four weights and four inputs; 4-bit weights are unsigned. `begin`
 * and `finish` enclose a group. */
#if defined(__AVX512VNNI__)

/* vpdpbusd takes unsigned weights: 8-bit ones are shifted by 128, and `begin` makes up for it. */
FORCED ints begin(const int bits, int32_t offset) { return bits == 8 ? (ints)_mm512_set1_epi32(offset) : (ints){0}; }
FORCED ints ready(ints weights, const int bits) { return bits == 8 ? (ints)((words)weights ^ 0x80808080u) : weights; }
FORCED ints add4(ints sums, ints weights, int32_t inputs, const int bits) {
    (void)bits;
    return (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(inputs));
}
FORCED ints finish(ints sums, const int bits) { (void)bits; return sums; }

#else

FORCED ints begin(const int bits, int32_t offset) { (void)bits, (void)offset; return (ints){0}; }
FORCED ints ready(ints weights, const int bits) { (void)bits; return weights; }

/* `pairs` returns the sums of two products in 16 bits each. They cannot overflow: weights are at most 128 and inputs at
 * most 127 in size. 16 of 4-bit weights fit as well, so these are summed in 16 bits until the group ends. */
#if defined(__AVX512BW__)
FORCED pairs_of_sums pairs(ints weights, int32_t inputs, const int bits) {
    __m512i w = (__m512i)weights, x = _mm512_set1_epi32(inputs);
    if (bits == 4) return (pairs_of_sums)_mm512_maddubs_epi16(w, x);
    x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
    return (pairs_of_sums)_mm512_maddubs_epi16(_mm512_abs_epi8(w), x);
}
FORCED ints widened(pairs_of_sums sums) { return (ints)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1)); }
#elif defined(__AVX2__)
FORCED pairs_of_sums pairs(ints weights, int32_t inputs, const int bits) {
    __m256i w = (__m256i)weights, x = _mm256_set1_epi32(inputs);
    if (bits == 4) return (pairs_of_sums)_mm256_maddubs_epi16(w, x);
    return (pairs_of_sums)_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
}
FORCED ints widened(pairs_of_sums sums) { return (ints)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)); }
#else
FORCED pairs_of_sums even(ints pairs) { return (pairs_of_sums)((words)pairs << 8 & 0xff00ff00u) >> 8; }
FORCED pairs_of_sums odd(ints pairs) { return (pairs_of_sums)pairs >> 8; }
FORCED pairs_of_sums pairs(ints weights, int32_t inputs, const int bits) {
    ints x = (ints){0} + inputs;
    (void)bits;
    return even(weights) * even(x) + odd(weights) * odd(x);
}
FORCED ints widened(pairs_of_sums sums) { return ((ints)((words)sums << 16) >> 16) + ((ints)sums >> 16); }
#endif

FORCED ints add4(ints sums, ints weights, int32_t inputs, const int bits) {
    pairs_of_sums found = pairs(weights, inputs, bits);
    return bits == 4 ? (ints)((pairs_of_sums)sums + found) : (ints)(sums + widened(found));
}
FORCED ints finish(ints sums, const int bits) { return bits == 4 ? widened((pairs_of_sums)sums) : sums; }

#endif

/* -- rounding of the inputs ---------------------------------------------------------------------------------------- */

FORCED ints nearest(floats numbers) { /* ties to even */
#if defined(__AVX512F__)
    return (ints)_mm512_cvtps_epi32((__m512)numbers);
#elif defined(__AVX2__)
    return (ints)_mm256_cvtps_epi32((__m256)numbers);
#elif defined(__x86_64__)
    return (ints)_mm_cvtps_epi32((__m128)numbers);
#else
    ints result;
    for (int i = 0; i < LANES; i++) result[i] = (int32_t)__builtin_lrintf(numbers[i]);
    return result;
#endif
}

#define PARTS (GROUP / LANES) /* vectors of a group */

#if LANES == 16
FORCED int32_t sum_of_ints(ints x) { return _mm512_reduce_add_epi32((__m512i)x); }
FORCED int32_t largest_int(ints x) { return _mm512_reduce_max_epi32((__m512i)x); }
#elif defined(__AVX2__)
FORCED int32_t sum_of_ints(ints x) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
FORCED int32_t largest_int(ints x) {
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
#else
FORCED int32_t sum_of_ints(ints x) {
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}
FORCED int32_t largest_int(ints x) {
    int32_t largest = x[0];
    for (int i = 1; i < LANES; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}
#endif

/* x: the group's inputs. Offsets are needed by weights of 8 bits only. */
FORCED void round_group(const floats *x, Group *group, const int with_offsets) {
    ints bits = (ints){0}; /* of the largest size in each lane: NaN and infinity are above all others */
    for (int i = 0; i < PARTS; i++) {
        ints size = (ints)x[i] & 0x7fffffff;
        bits = (ints)chosen(bits > size, (floats)bits, (floats)size);
    }
    int32_t largest = largest_int(bits);
    float size, inverse = 0;
    memcpy(&size, &largest, sizeof size);
    group->scale = size / 127;
    if (largest >= 0x7f800000) { /* what is not finite must stay visible in the results */
        uint32_t nan = 0x7fc00000;
        memcpy(&group->scale, &nan, sizeof nan);
    } else if (largest >= 0x03800000) { /* 2^-120; 127 / size would overflow for smaller ones, which are zeros */
        inverse = 127 / size;
    }
    ints halves[2] = {{0}, {0}};
    for (int i = 0; i < PARTS; i++) {
        ints rounded = nearest(x[i] * inverse);
        halves[i * 2 / PARTS] += rounded;
        *(bytes *)(group->values + i * LANES) = __builtin_convertvector(rounded, bytes);
    }
    group->total = group->scale * (float)sum_of_ints(halves[0] + halves[1]);
    if (with_offsets)
        for (int i = 0; i < 2; i++) group->offsets[i] = -128 * sum_of_ints(halves[i]);
}

/* Reads `count` inputs of a row from place `from` on; the rest of the group is zeros. */
FORCED void read_group(const Product *p, long from, long count, floats *x) {
    if (p->bf16) {
        uint16_t some[GROUP] = {0};
        const uint16_t *inputs = (const uint16_t *)p->x + from;
        if (count < GROUP) inputs = memcpy(some, inputs, (size_t)count * sizeof *some);
        for (int i = 0; i < PARTS; i++) x[i] = widen_bfloats(inputs + i * LANES);
    } else {
        float some[GROUP] = {0};
        const float *inputs = (const float *)p->x + from;
        if (count < GROUP) inputs = memcpy(some, inputs, (size_t)count * sizeof *some);
        for (int i = 0; i < PARTS; i++) x[i] = ((const floats *)inputs)[i];
    }
}

static void round_row(const Product *p, long row, Group *groups) {
    for (long from = 0; from < p->in; from += GROUP, groups++) {
        floats x[PARTS];
        if (p->in - from >= GROUP) read_group(p, row * p->in + from, GROUP, x);
        else read_group(p, row * p->in + from, p->in - from, x);
        if (p->kind == FOUR) round_group(x, groups, 0);
        else round_group(x, groups, 1);
    }
}

/* -- products ------------------------------------------------------------------------------------------------------ */

FORCED void store(const Product *p, long row, long column, floats sums) {
    long count = p->out - column, place = row * p->out + column;
    float biases[LANES] = {0};
    if (count <= 0) return; /* columns that fill the last panel */
    if (p->bias) {
        memcpy(biases, p->bias + column, (size_t)(count < LANES ? count : LANES) * sizeof(float));
        sums += *(const floats *)biases;
    }
    if (p->bf16) {
        shorts narrow = narrow_bfloats(sums);
        if (count >= LANES) *(shorts *)((uint16_t *)p->y + place) = narrow;
        else memcpy((uint16_t *)p->y + place, &narrow, (size_t)count * sizeof(uint16_t));
    } else if (count >= LANES) {
        *(floats *)((float *)p->y + place) = sums;
    } else {
        memcpy((float *)p->y + place, &sums, (size_t)count * sizeof(float));
    }
}

FORCED floats scales_at(const Product *p, const uint8_t *values_end, long set, long lane) {
    if (p->half_scales) return widen_halves((const uint16_t *)values_end + set * COLUMNS + lane);
    return *(const floats *)(values_end + 4 * (set * COLUMNS + lane));
}

FORCED ints weights_at(const uint8_t *block, long quad, long lane, const int kind) {
    if (kind != FOUR) return *(const ints *)(block + 64 * quad + 4 * lane);
    words both = *(const words *)(block + 64 * (quad % 4) + 4 * lane);
    return (ints)((quad < 4 ? both : both >> 4) & 0x0f0f0f0fu);
}

/* Adds to the sums of `rows` rows and `wide` vectors of columns the products of `quads` quads, and multiplies by the
 * scales. The first vector begins with column `lane` of `block`; `next` bytes from there is the block of the second, if
 * it is another panel's. */
FORCED void add_quads(
    const Product *p, const Group *x, long stride, const uint8_t *block, long next, long lane, floats sums[][WIDE],
    const long first, const long quads, const long rows, const long wide, const int kind) {
    const int bits = kind == FOUR ? 4 : 8;
    ints totals[ROWS][WIDE];
    UNROLLED for (long r = 0; r < rows; r++) {
        const int32_t *offsets = x[r * stride].offsets;
        UNROLLED for (long v = 0; v < wide; v++)
            totals[r][v] = begin(bits, quads == 8 ? offsets[0] + offsets[1] : offsets[first / 4]);
    }
    UNROLLED for (long quad = first; quad < first + quads; quad++) {
        ints weights[WIDE];
        UNROLLED for (long v = 0; v < wide; v++)
            weights[v] = ready(weights_at(block + v * next, quad, lane + v * BESIDE, kind), bits);
        UNROLLED for (long r = 0; r < rows; r++) {
            int32_t inputs;
            memcpy(&inputs, x[r * stride].values + 4 * quad, sizeof inputs);
            UNROLLED for (long v = 0; v < wide; v++) totals[r][v] = add4(totals[r][v], weights[v], inputs, bits);
        }
    }
    UNROLLED for (long v = 0; v < wide; v++) {
        floats scales = scales_at(p, block + v * next + (kind == FOUR ? 256 : 512), first / 4, lane + v * BESIDE);
        UNROLLED for (long r = 0; r < rows; r++)
            sums[r][v] += __builtin_convertvector(finish(totals[r][v], bits), floats) * (scales * x[r * stride].scale);
    }
}

/* Computes `rows` rows of `wide` vectors of columns, which begin with `lane` of a panel. x: the first group of the first
 * row. */
FORCED void tile(
    const Product *p, const Group *x, long row, long panel, long lane, const long rows, const long wide,
    const int kind) {
    long groups = (p->in + GROUP - 1) / GROUP, next = BESIDE ? 0 : groups * p->block;
    const uint8_t *block = p->panels + panel * groups * p->block;
    floats sums[ROWS][WIDE];
    UNROLLED for (long r = 0; r < rows; r++)
        UNROLLED for (long v = 0; v < wide; v++) sums[r][v] = (floats){0};
    for (long g = 0; g < groups; g++, x++, block += p->block) {
        if (kind == EIGHT_BY_16) {
            add_quads(p, x, groups, block, next, lane, sums, 0, 4, rows, wide, kind);
            add_quads(p, x, groups, block, next, lane, sums, 4, 4, rows, wide, kind);
        } else {
            add_quads(p, x, groups, block, next, lane, sums, 0, 8, rows, wide, kind);
        }
        if (p->has_minimums)
            UNROLLED for (long v = 0; v < wide; v++) {
                floats minimums = scales_at(p, block + v * next + (kind == FOUR ? 256 : 512), 1, lane + v * BESIDE);
                UNROLLED for (long r = 0; r < rows; r++) sums[r][v] += minimums * x[r * groups].total;
            }
    }
    UNROLLED for (long r = 0; r < rows; r++)
        UNROLLED for (long v = 0; v < wide; v++) store(p, row + r, panel * COLUMNS + lane + v * LANES, sums[r][v]);
}

/* Computes the rows from `row` to `end` of one vector of columns; x: the groups of row `row`. */
FORCED void strip(const Product *p, const Group *x, long row, long end, long panel, long lane, const int kind) {
    long groups = (p->in + GROUP - 1) / GROUP;
    for (; row + ROWS <= end; row += ROWS, x += ROWS * groups) tile(p, x, row, panel, lane, ROWS, 1, kind);
    switch (end - row) {
#if ROWS > 4
    case 7: tile(p, x, row, panel, lane, 7, 1, kind); break;
    case 6: tile(p, x, row, panel, lane, 6, 1, kind); break;
    case 5: tile(p, x, row, panel, lane, 5, 1, kind); break;
    case 4: tile(p, x, row, panel, lane, 4, 1, kind); break;
#endif
    case 3: tile(p, x, row, panel, lane, 3, 1, kind); break;
    case 2: tile(p, x, row, panel, lane, 2, 1, kind); break;
    case 1: tile(p, x, row, panel, lane, 1, 1, kind); break;
    }
}

/* Computes the rows from `row` to `end` of a panel, or of two neighbours. Many rows are computed of WIDE vectors at a
 * time, so that each input is read once for all of them. */
FORCED void panels_of(const Product *p, const Group *x, long row, long end, long panel, long count, const int kind) {
    long groups = (p->in + GROUP - 1) / GROUP;
    for (long lane = 0; lane < COLUMNS; lane += BESIDE ? WIDE * LANES : COLUMNS) {
        long from = row;
        if (BESIDE || count == WIDE)
            for (; from + TALL <= end; from += TALL)
                tile(p, x + (from - row) * groups, from, panel, lane, TALL, WIDE, kind);
        for (long v = 0; v < (BESIDE ? WIDE : count); v++)
            strip(p, x + (from - row) * groups, from, end, panel + (BESIDE ? 0 : v), lane + v * BESIDE, kind);
    }
}

static void multiply(const Product *p, const Group *x, long row, long end, long panel, long count) {
    if (p->kind == FOUR) panels_of(p, x, row, end, panel, count, FOUR);
    else if (p->kind == EIGHT) panels_of(p, x, row, end, panel, count, EIGHT);
    else panels_of(p, x, row, end, panel, count, EIGHT_BY_16);
}

#define TOGETHER (BESIDE ? 1 : WIDE) /* panels */
#define CACHED (512 << 10) /* bytes of rounded inputs that stay in a core's second cache while all panels pass */

typedef struct {
    const Product *product;
    Group *x;
    long groups, row, end;
} Job;

static void round_rows(const void *data, long from, long to) {
    const Job *job = data;
    for (long row = from; row < to; row++) round_row(job->product, row, job->x + row * job->groups);
}

static void multiply_panels(const void *data, long from, long to) {
    const Job *job = data;
    for (long panel = from; panel < to; panel += TOGETHER)
        multiply(job->product, job->x + job->row * job->groups, job->row, job->end, panel,
                 to - panel < TOGETHER ? to - panel : TOGETHER);
}

/* Returns 0, or 1 if there is no memory for the rounded inputs. */
int baton_quantised_product(const Product *p) {
    long groups = (p->in + GROUP - 1) / GROUP, panels = (p->out + COLUMNS - 1) / COLUMNS;
    Group *x = aligned_alloc(64, ((size_t)(p->rows * groups) * sizeof *x + 63) / 64 * 64);
    if (!x) return 1;
    Job job = {p, x, groups, 0, 0};
    share_evenly(round_rows, &job, p->rows, p->threads, p->rows * p->in > 32768);
    long most = CACHED / (groups * (long)sizeof *x) / ROWS * ROWS, step = most < ROWS ? ROWS : most;
    long chunk = (panels / (8 * p->threads) + TOGETHER) / TOGETHER * TOGETHER;
    for (; job.row < p->rows; job.row += step) {
        job.end = job.row + step < p->rows ? job.row + step : p->rows;
        share(multiply_panels, &job, panels, chunk, p->threads);
    }
    free(x);
    return 0;
}
