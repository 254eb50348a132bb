/* Computes attention over the paged pool, of chunks and of decodes, where keys and values lie: nothing is gathered, and
 * no whole matrix of scores is made. Keys are taken in stretches that fit the caches, with an online softmax
 * (Milakov and Gimelshein, arXiv 1805.02867) over them, as in FlashAttention (arXiv 2205.14135).
 *
 * There are two forms. A decode has few query heads for each key head, so it reads each key once and multiplies it with
 * each of them. A chunk is divided into tiles of queries: each stretch of keys is widened once for a tile, and the
 * products of the two are those of small matrices, whose sums stay in registers.
 *
 * It is plain C without headers of torch, so one library serves any version of torch.
 */
#include "stored_rows.h"
#include "threads.h"

#define MAX_HEADS 128
#define MAX_HEAD_DIM 256
#define TILE_ROWS 96  /* queries times query heads of one key head: a multiple of three vectors */
#define STRETCH 32    /* keys that a tile takes at once */
#define HIDDEN -1e30f /* score of a key that a query does not see */
#define LOWEST -1e29f /* largest score of a query that has seen no key */

typedef struct {
    const element *query;
    const stored *keys, *values;
    element *output;
    /* [sequences]: row of the first query, number of queries, number of tokens, place of its first block in `tables` */
    const int64_t *rows, *query_lens, *context_lens, *table_starts;
    const int64_t *tables; /* blocks of all sequences, one sequence after the other */
    long sequences, heads, kv_heads, head_dim, block_size, window; /* window 0: none */
    long query_row, query_head; /* strides, in elements; output is [rows, heads, head_dim] */
    long block, token, head;    /* strides of keys and values, in what they are stored as */
    float scale, softcap; /* softcap 0: none */
    int threads;
} Attention;

FORCED floats capped(floats scores, float softcap) {
    floats powers = exponentials(scores * (2 / softcap));
    return softcap * (powers - 1) / (powers + 1);
}

/* Returns 2 to the power of each lane, none of which is above 0. What is too small for a normal number is 0 or nearly.
 * The relative error is 2e-7, or 4e-5 where results are rounded to 16 bits anyway. */
FORCED floats weights_of(floats x) {
#if LANES == 16
    floats whole = (floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    floats rest = x - whole;
#else
    ints seen = x > -126.0f;
    ints below = __builtin_convertvector(larger(x, (floats){0} - 126.0f) - 0.5f, ints);
    floats rest = larger(x, (floats){0} - 126.0f) - __builtin_convertvector(below, floats);
#endif
#if defined(FLOAT32)
    floats sum = 0.00961812911f + rest * (0.00133335581f + rest * 0.000154035304f);
#else
    floats sum = (floats){0} + 0.00961812911f;
#endif
    sum = 1.0f + rest * (0.693147181f + rest * (0.240226507f + rest * (0.0555041087f + rest * sum)));
#if LANES == 16
    return (floats)_mm512_scalef_ps((__m512)sum, (__m512)whole);
#else
    return (floats)(seen & (ints)(sum * (floats)((below + 127) << 23)));
#endif
}

#define LOG2_E 1.44269504f

/* What differences of scores are multiplied with, to become powers of 2. Scores of chunks are not multiplied by the
 * scale before, unless more is done with them than to compare them. */
static float to_powers(const Attention *a) { return a->softcap == 0 && a->scale > 0 ? a->scale * LOG2_E : LOG2_E; }

/* -- units of products ----------------------------------------------------------------------------------------------- */

/* A unit is what one lane of a product takes at once: a float, or two bfloat16 where the processor multiplies pairs. */
#if defined(BFLOAT16) && defined(__AVX512BF16__)
#define PAIRED 1
typedef uint32_t unit;
typedef words units;
/* Returns pairs of the i-th number of the lower half and the i-th of the upper half. */
FORCED units interleaved(__m512i halves) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (units)_mm512_permutexvar_epi16(order, halves);
}
/* Returns pairs of a lane of `low` and the same lane of `high`, rounded to bfloat16. */
FORCED units paired(floats low, floats high) {
    return interleaved((__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}
FORCED floats product(floats sums, unit a, words b) {
    return (floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
}
#else
#define PAIRED 0
typedef float unit;
typedef floats units;
FORCED floats product(floats sums, unit a, units b) { return sums + a * b; }
#endif
#define PER_UNIT (1 + PAIRED)

/* -- decodes ------------------------------------------------------------------------------------------------------- */

/* The state of a query head during the softmax. Of PAIRED elements, `query` has pairs of them as they lie, and each two
 * vectors of `mixed` are those of numbers that `unpacked` lists. */
typedef struct {
    floats query[MAX_HEAD_DIM / LANES], mixed[MAX_HEAD_DIM / LANES], total; /* total: its lanes add up to the sum */
    float largest;
} Head;

/* Turns the products of a head with `count` keys into weights, and keeps the softmax's state. vectors: of head_dim. */
FORCED floats weights_of_head(const Attention *a, Head *head, floats scores, long count, const long vectors) {
    if (a->softcap != 0) scores = capped(scores, a->softcap);
    for (long t = count; t < LANES; t++) scores[t] = HIDDEN;
    float highest = largest_lane(scores);
    if (highest > head->largest) {
        float shrink = weights_of((floats){0} + (head->largest - highest) * LOG2_E)[0];
        for (long v = 0; v < vectors; v++) head->mixed[v] *= shrink;
        head->total *= shrink;
        head->largest = highest;
    }
    floats weights = weights_of((scores - head->largest) * LOG2_E);
    head->total += weights;
    return weights;
}

/* Attends to at most LANES tokens of one block, with `group` query heads over one key head. vectors: of head_dim.
 * `ahead`: elements from here to the same place in the next block, which is prefetched meanwhile, since blocks lie
 * anywhere and the hardware cannot predict it. Inlined with constants, so that sums stay in registers. */
FORCED void attend_group(
    const Attention *a, Head *heads, const stored *keys, const stored *values, long ahead, long count,
    const long group, const long vectors) {
    floats parts[4][LANES], weights[4];
    const floats key_scales = scales_of(keys, a->token, LANES * vectors, count);
    const floats value_scales = scales_of(values, a->token, LANES * vectors, count);
    for (long t = 0; t < count; t++) {
        floats scores[4] = {0};
        for (long v = 0; v < vectors; v++) {
            const stored *from = keys + t * a->token + LANES * v;
            if (LANES * v * sizeof(stored) % 64 == 0) __builtin_prefetch(from + ahead, 0, 2);
            floats key = widen_stored(from);
            for (long g = 0; g < group; g++) scores[g] += heads[g].query[v] * key;
        }
        for (long g = 0; g < group; g++) parts[g][t] = scores[g];
    }
    for (long t = count; t < LANES; t++)
        for (long g = 0; g < group; g++) parts[g][t] = (floats){0};
    for (long g = 0; g < group; g++) {
        floats scores = sums_of_each(parts[g]) * key_scales;
        weights[g] = weights_of_head(a, heads + g, scores, count, vectors) * value_scales;
    }
    for (long v = 0; v < vectors; v++) {
        floats mixed[4];
        for (long g = 0; g < group; g++) mixed[g] = heads[g].mixed[v];
        for (long t = 0; t < count; t++) {
            const stored *from = values + t * a->token + LANES * v;
            if (LANES * v * sizeof(stored) % 64 == 0) __builtin_prefetch(from + ahead, 0, 2);
            floats value = widen_stored(from);
            for (long g = 0; g < group; g++) mixed[g] += weights[g][t] * value;
        }
        for (long g = 0; g < group; g++) heads[g].mixed[v] = mixed[g];
    }
}

#if PAIRED && !SCALED
/* Returns whether decodes multiply pairs: of two dims with keys, and of two tokens with values. */
FORCED int in_pairs(const long vectors) { return vectors % 2 == 0; }

/* As `attend_group`, with twice the products an instruction; weights are rounded to bfloat16 for it, as in chunks. */
FORCED void attend_group_in_pairs(
    const Attention *a, Head *heads, const stored *keys, const stored *values, long ahead, long count,
    const long group, const long vectors) {
    floats parts[4][LANES];
    unit weights[4][LANES / 2];
    for (long t = 0; t < count; t++) {
        floats scores[4] = {0};
        for (long v = 0; v < vectors / 2; v++) {
            const stored *from = keys + t * a->token + 2 * LANES * v;
            __builtin_prefetch(from + ahead, 0, 2);
            __m512bh key = (__m512bh)_mm512_loadu_si512(from);
            for (long g = 0; g < group; g++)
                scores[g] = (floats)_mm512_dpbf16_ps((__m512)scores[g], (__m512bh)heads[g].query[v], key);
        }
        for (long g = 0; g < group; g++) parts[g][t] = scores[g];
    }
    for (long t = count; t < LANES; t++)
        for (long g = 0; g < group; g++) parts[g][t] = (floats){0};
    for (long g = 0; g < group; g++) {
        floats each = weights_of_head(a, heads + g, sums_of_each(parts[g]) * a->scale, count, vectors);
        *(__m256i_u *)weights[g] = (__m256i)_mm512_cvtneps_pbh((__m512)each);
    }
    for (long v = 0; v < vectors; v += 2) {
        floats low[4], high[4];
        for (long g = 0; g < group; g++) low[g] = heads[g].mixed[v], high[g] = heads[g].mixed[v + 1];
        for (long t = 0; t < count; t += 2) {
            const stored *from = values + t * a->token + LANES * v;
            const stored *other = t + 1 < count ? from + a->token : from; /* its weight is 0 */
            __builtin_prefetch(from + ahead, 0, 2), __builtin_prefetch(other + ahead, 0, 2);
            __m512i first = _mm512_loadu_si512(from), second = _mm512_loadu_si512(other);
            words lows = (words)_mm512_unpacklo_epi16(first, second);
            words highs = (words)_mm512_unpackhi_epi16(first, second);
            for (long g = 0; g < group; g++) {
                low[g] = product(low[g], weights[g][t / 2], lows);
                high[g] = product(high[g], weights[g][t / 2], highs);
            }
        }
        for (long g = 0; g < group; g++) heads[g].mixed[v] = low[g], heads[g].mixed[v + 1] = high[g];
    }
}

/* Puts two vectors of `mixed` into order: they come from the lower and the higher halves of each 128 bits. */
FORCED void unpacked(floats *low, floats *high) {
    const ints first = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    const __m512 halves[2] = {(__m512)*low, (__m512)*high};
    *low = (floats)_mm512_permutex2var_ps(halves[0], (__m512i)first, halves[1]);
    *high = (floats)_mm512_permutex2var_ps(halves[0], (__m512i)(first + 8), halves[1]);
}
#else
FORCED int in_pairs(const long vectors) { return (void)vectors, 0; }
FORCED void unpacked(floats *low, floats *high) { (void)low, (void)high; }
#endif

FORCED void attend_some(
    const Attention *a, Head *heads, const stored *keys, const stored *values, long ahead, long count,
    const long group, const long vectors) {
#if PAIRED && !SCALED
    if (in_pairs(vectors)) {
        attend_group_in_pairs(a, heads, keys, values, ahead, count, group, vectors);
        return;
    }
#endif
    attend_group(a, heads, keys, values, ahead, count, group, vectors);
}

FORCED void attend_block(
    const Attention *a, Head *heads, const stored *keys, const stored *values, long ahead, long begin, long end,
    const long vectors) {
    for (long first = begin; first < end; first += LANES) {
        const stored *some = keys + first * a->token, *others = values + first * a->token;
        long count = end - first < LANES ? end - first : LANES, left = a->heads / a->kv_heads;
        Head *next = heads;
        for (; left >= 4; left -= 4, next += 4) attend_some(a, next, some, others, ahead, count, 4, vectors);
        if (left == 3) attend_some(a, next, some, others, ahead, count, 3, vectors);
        if (left == 2) attend_some(a, next, some, others, ahead, count, 2, vectors);
        if (left == 1) attend_some(a, next, some, others, ahead, count, 1, vectors);
    }
}

static void begin_decode(const Attention *a, Head *heads, long row, long first_head, long count) {
    for (long h = 0; h < count; h++) {
        const element *query = a->query + row * a->query_row + (first_head + h) * a->query_head;
        for (long v = 0; v < a->head_dim / LANES; v++) {
            heads[h].query[v] = widen_lanes(query + LANES * v) * a->scale;
            heads[h].mixed[v] = (floats){0};
        }
        if (in_pairs(a->head_dim / LANES)) memcpy(heads[h].query, query, (size_t)a->head_dim * sizeof *query);
        heads[h].largest = LOWEST, heads[h].total = (floats){0};
    }
}

static void end_decode(const Attention *a, Head *heads, long row, long first_head, long count) {
    for (long h = 0; h < count; h++) {
        element *output = a->output + (row * a->heads + first_head + h) * a->head_dim;
        float share = 1 / sum_of_lanes(heads[h].total);
        if (in_pairs(a->head_dim / LANES))
            for (long v = 0; v < a->head_dim / LANES; v += 2) unpacked(heads[h].mixed + v, heads[h].mixed + v + 1);
        for (long v = 0; v < a->head_dim / LANES; v++) narrow_lanes(heads[h].mixed[v] * share, output + LANES * v);
    }
}

/* Attends with key heads `from` ... `to` - 1 of a sequence with one query. It takes all of a block's heads before the
 * next block, since they lie side by side. */
static void attend_decode(const Attention *a, long sequence, long from, long to) {
    long group = a->heads / a->kv_heads, size = a->block_size, row = a->rows[sequence];
    long stop = a->context_lens[sequence], start = a->window && stop > a->window ? stop - a->window : 0;
    const int64_t *table = a->tables + a->table_starts[sequence];
    Head heads[MAX_HEADS];
    begin_decode(a, heads, row, from * group, (to - from) * group);
    for (long i = start / size; i * size < stop; i++) {
        long begin = i * size < start ? start % size : 0, end = stop - i * size < size ? stop - i * size : size;
        long ahead = (i + 1) * size < stop ? (table[i + 1] - table[i]) * a->block : 0;
        for (long h = from; h < to; h++) {
            long place = table[i] * a->block + h * a->head;
            const stored *keys = a->keys + place, *values = a->values + place;
            Head *some = heads + (h - from) * group;
            if (a->head_dim == 64) attend_block(a, some, keys, values, ahead, begin, end, 64 / LANES);
            else if (a->head_dim == 128) attend_block(a, some, keys, values, ahead, begin, end, 128 / LANES);
            else attend_block(a, some, keys, values, ahead, begin, end, a->head_dim / LANES);
        }
    }
    end_decode(a, heads, row, from * group, (to - from) * group);
}

/* -- products of small matrices ------------------------------------------------------------------------------------ */

#if LANES == 16 || defined(__aarch64__)
#define STRIP 8 /* rows of a product whose sums are in registers together: 8 x 3 of 32 */
#else
#define STRIP 4 /* 4 x 3 of 16 */
#endif

/* Computes c = a * b, or c = c * shrink + a * b. a: element (i, k) is a[i * row + k * step]; b: [steps, width]; c:
 * STRIP rows of `width`, of which `vectors` vectors are computed; shrink: one number for each column, or NULL. */
FORCED void multiply_strip(
    const unit *a, long row, long step, const unit *b, float *c, const float *shrink, long steps, long width,
    const int vectors) {
    floats sums[STRIP][3];
#pragma GCC unroll 8
    for (int i = 0; i < STRIP; i++)
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) {
            sums[i][v] = (floats){0};
            if (shrink) sums[i][v] = ((const floats *)(c + i * width))[v] * ((const floats *)shrink)[v];
        }
    for (long k = 0; k < steps; k++, a += step, b += width) {
#pragma GCC unroll 8
        for (int i = 0; i < STRIP; i++)
#pragma GCC unroll 3
            for (int v = 0; v < vectors; v++) sums[i][v] = product(sums[i][v], a[i * row], ((const units *)b)[v]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < STRIP; i++)
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) ((floats *)(c + i * width))[v] = sums[i][v];
}

/* As `multiply_strip`, for `count` rows (rounded up to whole strips) and the whole width. */
FORCED void multiply(
    const unit *a, long row, long step, const unit *b, float *c, const float *shrink, long count, long steps,
    long width) {
    for (long v = 0; v < width / LANES; v += 3) {
        long left = width / LANES - v;
        for (long i = 0; i < count; i += STRIP) {
            const unit *from = a + i * row, *with = b + v * LANES;
            float *to = c + i * width + v * LANES;
            const float *by = shrink ? shrink + v * LANES : NULL;
            if (left >= 3) multiply_strip(from, row, step, with, to, by, steps, width, 3);
            else if (left == 2) multiply_strip(from, row, step, with, to, by, steps, width, 2);
            else multiply_strip(from, row, step, with, to, by, steps, width, 1);
        }
    }
}

/* -- tiles of chunks ----------------------------------------------------------------------------------------------- */

/* One tile's state. Queries, scores and sums are transposed: a column for each row of the tile, `width` of them. So the
 * softmax runs in lanes, and keys and values are multiplied as they lie, one unit of theirs with a vector at a time. */
typedef struct {
    unit query[MAX_HEAD_DIM * MAX_HEADS / PER_UNIT]; /* [head_dim / PER_UNIT, width] */
    unit keys[STRETCH * MAX_HEAD_DIM / PER_UNIT];    /* [STRETCH, head_dim / PER_UNIT] */
    unit values[STRETCH * MAX_HEAD_DIM / PER_UNIT];  /* [STRETCH / PER_UNIT, head_dim] */
    float key_scales[STRETCH], value_scales[STRETCH]; /* of `keys` and `values`, if they are SCALED */
    unit weights[STRETCH * MAX_HEADS / PER_UNIT];    /* [STRETCH / PER_UNIT, width] */
    float scores[STRETCH * MAX_HEADS];               /* [STRETCH, width] */
    float mixed[MAX_HEAD_DIM * MAX_HEADS];           /* [head_dim, width] */
    floats largest[MAX_HEADS / LANES], total[MAX_HEADS / LANES], shrink[MAX_HEADS / LANES];
    ints positions[MAX_HEADS / LANES]; /* place of each row's query in its sequence */
    long width;
} __attribute__((aligned(64))) Tile;

static void begin_tile(const Attention *a, Tile *tile, long row, long count, long position, long kv_head) {
    long group = a->heads / a->kv_heads, rows = count * group;
    long width = tile->width = (rows + LANES - 1) / LANES * LANES;
    memset(tile->query, 0, sizeof(unit) * (size_t)(width * a->head_dim / PER_UNIT));
    memset(tile->mixed, 0, sizeof(float) * (size_t)(width * a->head_dim));
    for (long m = 0; m < rows; m++) {
        long head = kv_head * group + m % group;
        const element *query = a->query + (row + m / group) * a->query_row + head * a->query_head;
        for (long d = 0; d < a->head_dim / PER_UNIT; d++)
#if PAIRED
            memcpy(tile->query + d * width + m, query + 2 * d, sizeof(unit));
#else
            tile->query[d * width + m] = widen(query[d]);
#endif
    }
    for (long m = 0; m < width; m++) {
        tile->positions[m / LANES][m % LANES] = (int32_t)(position + (m < rows ? m / group : 0));
        tile->largest[m / LANES][m % LANES] = LOWEST, tile->total[m / LANES][m % LANES] = 0;
    }
}

#if PAIRED
/* Puts the values of two tokens side by side: `dim` pairs. */
FORCED void pair_up(const element *first, const element *second, unit *pairs, long dim) {
    for (long d = 0; d < dim; d += LANES) {
        __m512i both = _mm512_inserti64x4(
            _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i_u *)(first + d))),
            _mm256_loadu_si256((const __m256i_u *)(second + d)), 1);
        *(units *)(pairs + d) = interleaved(both);
    }
}

/* Returns the row as elements. Whole numbers of 8 bits are exact in bfloat16; `room` takes them. */
FORCED const element *elements_of(const stored *row, element *room, long dim) {
#if SCALED
    for (long d = 0; d < dim; d += LANES) narrow_lanes(widen_stored(row + d), room + d);
    return room;
#else
    (void)room, (void)dim;
    return row;
#endif
}
#endif

/* Copies keys and values of `count` tokens from token `first` on into the tile, as units. */
static void load_stretch(const Attention *a, Tile *tile, const int64_t *table, long first, long count, long kv_head) {
    long dim = a->head_dim, size = a->block_size;
#if PAIRED
    static const element nothing[MAX_HEAD_DIM];
    element rooms[3][MAX_HEAD_DIM];
    const element *before = nothing; /* values of the token before */
#endif
    for (long k = 0; k < count; k++) {
        long token = first + k, place = table[token / size] * a->block + token % size * a->token + kv_head * a->head;
        const stored *stored_key = a->keys + place, *stored_value = a->values + place;
        tile->key_scales[k] = scale_of(stored_key, dim), tile->value_scales[k] = scale_of(stored_value, dim);
#if PAIRED
        const element *value = elements_of(stored_value, rooms[k % 2], dim);
        memcpy(tile->keys + k * dim / 2, elements_of(stored_key, rooms[2], dim), (size_t)dim * sizeof *value);
        if (k % 2 == 1) pair_up(before, value, tile->values + k / 2 * dim, dim);
        else if (k + 1 == count) pair_up(value, nothing, tile->values + k / 2 * dim, dim);
        before = value;
#else
        for (long d = 0; d < dim; d += LANES) {
            *(floats *)(tile->keys + k * dim + d) = widen_stored(stored_key + d);
            *(floats *)(tile->values + k * dim + d) = widen_stored(stored_value + d);
        }
#endif
    }
}

/* Turns products into scores in place: for `count` keys from `first` on, of the rows of vector v. Returns the largest
 * of each lane. */
FORCED floats score(const Attention *a, Tile *tile, long v, long first, long count, const int masked) {
    floats largest = tile->largest[v];
    if (!SCALED && !masked && a->softcap == 0 && a->scale > 0) {
        for (long k = 0; k < count; k++) largest = larger(largest, ((floats *)(tile->scores + k * tile->width))[v]);
        return largest;
    }
    for (long k = 0; k < count; k++) {
        floats *place = (floats *)(tile->scores + k * tile->width) + v;
        floats scores = *place * (SCALED ? tile->key_scales[k] : 1);
        if (a->softcap != 0) scores = capped(scores * a->scale, a->softcap);
        else if (a->scale <= 0) scores *= a->scale;
        if (masked) {
            ints distance = tile->positions[v] - (int32_t)(first + k);
            ints seen = distance >= 0;
            if (a->window) seen &= distance < (int32_t)a->window;
            scores = chosen(seen, scores, (floats){0} + HIDDEN);
        }
        *place = scores;
        largest = larger(largest, scores);
    }
    return largest;
}

/* Turns scores into weights, and keeps the softmax's state. */
static void weigh(const Attention *a, Tile *tile, long first, long count, int masked) {
    const float factor = to_powers(a);
    for (long v = 0; v < tile->width / LANES; v++) {
        floats largest = masked ? score(a, tile, v, first, count, 1) : score(a, tile, v, first, count, 0);
        floats shrink = tile->shrink[v] = weights_of((tile->largest[v] - largest) * factor);
        floats total = tile->total[v] * shrink;
        for (long k = 0; k < count; k += PER_UNIT) {
            floats weights = weights_of((((floats *)(tile->scores + k * tile->width))[v] - largest) * factor);
            units *place = (units *)(tile->weights + k / PER_UNIT * tile->width) + v;
            total += weights;
#if PAIRED
            floats others = {0};
            if (k + 1 < count)
                others = weights_of((((floats *)(tile->scores + (k + 1) * tile->width))[v] - largest) * factor);
            total += others;
            if (SCALED) weights *= tile->value_scales[k], others *= tile->value_scales[k + 1 < count ? k + 1 : k];
            *place = paired(weights, others);
#else
            if (SCALED) weights *= tile->value_scales[k];
            *place = weights;
#endif
        }
        tile->largest[v] = largest, tile->total[v] = total;
    }
}

/* Returns LANES numbers that lie `apart` from each other. */
FORCED floats column(const float *from, long apart) {
#if LANES == 16
    const ints places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (floats)_mm512_i32gather_ps((__m512i)(places * (int32_t)apart), from, 4);
#else
    floats found;
    for (long t = 0; t < LANES; t++) found[t] = from[t * apart];
    return found;
#endif
}

static void end_tile(const Attention *a, const Tile *tile, long row, long count, long kv_head) {
    long group = a->heads / a->kv_heads;
    for (long m = 0; m < count * group; m++) {
        element *output = a->output + ((row + m / group) * a->heads + kv_head * group + m % group) * a->head_dim;
        float share = 1 / tile->total[m / LANES][m % LANES];
        for (long d = 0; d < a->head_dim; d += LANES)
            narrow_lanes(column(tile->mixed + d * tile->width + m, tile->width) * share, output + d);
    }
}

FORCED void attend_stretch(Tile *tile, const Attention *a, long first, long count, int masked, const long dim) {
    long pairs = (count + PER_UNIT - 1) / PER_UNIT;
    multiply(tile->keys, dim / PER_UNIT, 1, tile->query, tile->scores, NULL, count, dim / PER_UNIT, tile->width);
    weigh(a, tile, first, count, masked);
    multiply(tile->values, 1, dim, tile->weights, tile->mixed, (float *)tile->shrink, dim, pairs, tile->width);
}

/* Attends with the queries `from` ... `from` + `count` - 1 of a sequence, and their heads that share a key head. */
static void attend_tile(const Attention *a, long sequence, long kv_head, long from, long count) {
    long row = a->rows[sequence] + from, position = a->context_lens[sequence] - a->query_lens[sequence] + from;
    long start = a->window && position >= a->window ? position - a->window + 1 : 0, stop = position + count;
    long dim = a->head_dim;
    const int64_t *table = a->tables + a->table_starts[sequence];
    Tile tile;
    begin_tile(a, &tile, row, count, position, kv_head);
    for (long first = start; first < stop; first += STRETCH) {
        long keys = stop - first < STRETCH ? stop - first : STRETCH;
        /* Either a query stands before some of the keys, or some are too old for one. */
        int masked = first + keys - 1 > position || (a->window && first <= stop - 1 - a->window);
        load_stretch(a, &tile, table, first, keys, kv_head);
        if (dim == 64) attend_stretch(&tile, a, first, keys, masked, 64);
        else if (dim == 128) attend_stretch(&tile, a, first, keys, masked, 128);
        else attend_stretch(&tile, a, first, keys, masked, dim);
    }
    end_tile(a, &tile, row, count, kv_head);
}

/* -- all sequences of a step --------------------------------------------------------------------------------------- */

static long queries_of_tile(const Attention *a) {
    long count = TILE_ROWS / (a->heads / a->kv_heads);
    return count ? count : 1;
}

static long parts_of_decode(const Attention *a) { /* with few sequences, their key heads are divided among threads */
    return a->sequences >= 2 * a->threads ? 1 : a->kv_heads;
}

static long items_of(const Attention *a, long sequence) {
    long queries = a->query_lens[sequence], each = queries_of_tile(a);
    return queries == 1 ? parts_of_decode(a) : (queries + each - 1) / each * a->kv_heads;
}

static void attend_item(const Attention *a, long sequence, long item) {
    long queries = a->query_lens[sequence], each = queries_of_tile(a), parts = parts_of_decode(a);
    if (queries == 1) {
        attend_decode(a, sequence, item * a->kv_heads / parts, (item + 1) * a->kv_heads / parts);
        return;
    }
    /* The last tiles come first: they see the most keys, and threads end together if small items come last. */
    long first = ((queries - 1) / each - item / a->kv_heads) * each;
    attend_tile(a, sequence, item % a->kv_heads, first, queries - first < each ? queries - first : each);
}

typedef struct {
    const Attention *attention;
    long taken;
} Items;

static void attend_items(void *data) { /* takes one item after the other, until none is left */
    Items *items = data;
    const Attention *a = items->attention;
    long sequence = 0, before = 0;
    while (sequence < a->sequences) {
        long item = __atomic_fetch_add(&items->taken, 1, __ATOMIC_RELAXED);
        while (sequence < a->sequences && item >= before + items_of(a, sequence)) before += items_of(a, sequence++);
        if (sequence < a->sequences) attend_item(a, sequence, item - before);
    }
}

#if SCALED
void NAME(attention_int8)(const Attention *a) {
#else
void NAME(attention)(const Attention *a) {
#endif
    Items items = {a, 0};
    run_on_threads(attend_items, &items, a->threads);
}
