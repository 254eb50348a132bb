/* Computes on CPUs, in bfloat16, what torch computes by many small operators or only after copies: the attention of
 * decodes over paged blocks, norms, gates, rotary positions and causal softmaxes. Matrix products are left to oneDNN.
 *
 * It is plain C without headers of torch, so one library works with any version of torch. It is not linked with an
 * OpenMP runtime: its symbols are found in the runtime that torch has loaded, so both share one pool of threads.
 * It is compiled once for each instruction set (`instruction_sets.py`). All sums are in float32. The functions check no
 * argument.
 */
#include <stdint.h>
#include <string.h>

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (words){__VA_ARGS__})
#endif

#define MAX_HEADS 128
#define MAX_VECTORS 16 /* vectors of 16 elements in a head, for head dimensions up to 256 */
#define MOST_KEPT 8192 /* exponentials that a softmax keeps between its two passes, at most */

typedef uint16_t bf16;

static inline float widen(bf16 value) {
    union { uint32_t bits; float number; } wide = {.bits = (uint32_t)value << 16};
    return wide.number;
}

/* Rounds to the nearest bfloat16, ties to even. The result for NaN is undefined. */
static inline bf16 narrow(float value) {
    union { float number; uint32_t bits; } wide = {.number = value};
    return (bf16)((wide.bits + 0x7fff + ((wide.bits >> 16) & 1)) >> 16);
}

/* Returns e^x for x clamped to -87 ... 87, as 2^whole * e^rest with a Taylor polynomial for e^rest. Unlike expf, this
 * is arithmetic only, which compilers vectorise. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x > 87.0f ? 87.0f : x;
    float scaled = x * 1.44269504f;
    int32_t whole = (int32_t)(scaled + (scaled < 0 ? -0.5f : 0.5f));
    float rest = x - (float)whole * 0.693147182f;
    float sum = 1.0f + rest * (1.0f + rest * (0.5f + rest * (0.166666667f + rest * (0.0416666667f +
                rest * (0.00833333333f + rest * 0.00138888889f)))));
    union { int32_t bits; float number; } power = {.bits = (whole + 127) << 23};
    return sum * power.number;
}

/* -- attention of decodes: one new token for each sequence over its blocks ----------------------------------------- */

/* The arguments of baton_decode_attention. `DecodeArguments` in bindings.py has the same fields. */
typedef struct {
    const bf16 *query, *keys, *values; /* keys and values of one layer, from block 0 of the pool on */
    bf16 *output;                      /* [rows, heads, head_dim], contiguous */
    const int64_t *rows;               /* [batch]: row of each sequence's token in query and output */
    const int64_t *tables;             /* [batch, width]: blocks of each sequence, in the order of its tokens */
    const int64_t *starts, *stops;     /* [batch]: first visible token of each sequence, and one beyond the last */
    long batch, width, heads, kv_heads, head_dim, block_size;
    long query_row, query_head, block, token; /* strides of query, and of keys and values, in elements */
    float scale, softcap;                     /* softcap 0 means that there is none */
    int threads;
} Decode;

typedef float floats __attribute__((vector_size(64), aligned(4)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef bf16 halves __attribute__((vector_size(32), aligned(2)));

/* Widens 16 elements that begin at `from`. */
static inline floats widen16(const bf16 *from) {
    words wide = __builtin_convertvector(*(const halves *)from, words) << 16;
    floats result;
    memcpy(&result, &wide, sizeof result);
    return result;
}

/* Returns a vector whose lane t is the sum of the lanes of parts[t], for 16 parts. Each of the four rounds shuffles and
 * adds pairs of vectors, which halves their number. */
static inline floats sums16(const floats *parts) {
    floats by8[8], by4[4], by2[2];
    for (int i = 0; i < 8; i++)
        by8[i] = SHUFFLE(parts[i], parts[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                 SHUFFLE(parts[i], parts[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        by4[i] = SHUFFLE(by8[i], by8[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
                 SHUFFLE(by8[i], by8[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        by2[i] = SHUFFLE(by4[i], by4[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                 SHUFFLE(by4[i], by4[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return SHUFFLE(by2[0], by2[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           SHUFFLE(by2[0], by2[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

/* Returns the largest lane if `largest` is set, else the sum of all lanes. */
static inline float reduce(floats parts, int largest) {
    float result = parts[0];
    for (int i = 1; i < 16; i++) result = !largest ? result + parts[i] : parts[i] > result ? parts[i] : result;
    return result;
}

static inline floats exponentials(floats x) {
    for (int i = 0; i < 16; i++) x[i] = exponential(x[i]);
    return x;
}

/* The state of a query head during an online softmax (Milakov and Gimelshein, arXiv 1805.02867). All weights are
 * relative to the largest score so far; when a larger one comes, `mixed` and `total` are scaled down.
 * query: the query times the scale. mixed: the weighted sum of the values so far. total: lanes that add up to the sum
 * of the weights so far. largest: the largest score so far. */
typedef struct {
    floats query[MAX_VECTORS], mixed[MAX_VECTORS], total;
    float largest;
} Head;

/* Attends to `count` (at most 16) tokens of one block with `group` (at most 4) query heads that share a key head.
 * `keys` and `values` point to the first of these tokens, and `vectors` is head_dim / 16.
 * `ahead` is the number of elements from here to the same place in the sequence's next block, which is prefetched
 * meanwhile: it may be anywhere in the pool, so the hardware cannot predict it.
 * The function is inlined with constants for `group` and often for `vectors`, so that its sums stay in registers. */
static inline __attribute__((always_inline)) void attend_group(
    const Decode *d, Head *heads, const bf16 *keys, const bf16 *values, long ahead, long count, const long group,
    const long vectors) {
    floats parts[4][16], weights[4];
    for (long t = 0; t < count; t++) {
        floats scores[4] = {0};
        for (long v = 0; v < vectors; v++) {
            if (v % 2 == 0) __builtin_prefetch(keys + t * d->token + 16 * v + ahead, 0, 2);
            floats key = widen16(keys + t * d->token + 16 * v);
            for (long g = 0; g < group; g++) scores[g] += heads[g].query[v] * key;
        }
        for (long g = 0; g < group; g++) parts[g][t] = scores[g];
    }
    for (long t = count; t < 16; t++)
        for (long g = 0; g < group; g++) parts[g][t] = (floats){0};
    for (long g = 0; g < group; g++) {
        Head *head = heads + g;
        floats scores = sums16(parts[g]);
        if (d->softcap != 0) {
            floats powers = exponentials(scores * (2 / d->softcap));
            scores = d->softcap * (powers - 1) / (powers + 1);
        }
        for (long t = count; t < 16; t++) scores[t] = -1e30f;
        float highest = reduce(scores, 1);
        if (highest > head->largest) {
            float shrink = exponential(head->largest - highest);
            for (long v = 0; v < vectors; v++) head->mixed[v] *= shrink;
            head->total *= shrink;
            head->largest = highest;
        }
        weights[g] = exponentials(scores - head->largest);
        head->total += weights[g];
    }
    for (long v = 0; v < vectors; v++) {
        floats mixed[4];
        for (long g = 0; g < group; g++) mixed[g] = heads[g].mixed[v];
        for (long t = 0; t < count; t++) {
            if (v % 2 == 0) __builtin_prefetch(values + t * d->token + 16 * v + ahead, 0, 2);
            floats value = widen16(values + t * d->token + 16 * v);
            for (long g = 0; g < group; g++) mixed[g] += weights[g][t] * value;
        }
        for (long g = 0; g < group; g++) heads[g].mixed[v] = mixed[g];
    }
}

/* Attends to the tokens `begin` ... `end` - 1 of one block with all query heads of one key head. */
static inline __attribute__((always_inline)) void attend_block(
    const Decode *d, Head *heads, const bf16 *keys, const bf16 *values, long ahead, long begin, long end,
    const long vectors) {
    for (long first = begin; first < end; first += 16) {
        const bf16 *some = keys + first * d->token, *others = values + first * d->token;
        long count = end - first < 16 ? end - first : 16, left = d->heads / d->kv_heads;
        Head *next = heads;
        for (; left >= 4; left -= 4, next += 4) attend_group(d, next, some, others, ahead, count, 4, vectors);
        if (left == 3) attend_group(d, next, some, others, ahead, count, 3, vectors);
        if (left == 2) attend_group(d, next, some, others, ahead, count, 2, vectors);
        if (left == 1) attend_group(d, next, some, others, ahead, count, 1, vectors);
    }
}

/* Computes the output of one sequence for the query heads of key heads `from` ... `to` - 1. It takes all of these heads
 * in a block before the next block, because the heads of a token are contiguous in memory. */
static void attend(const Decode *d, long sequence, long from, long to) {
    long group = d->heads / d->kv_heads, vectors = d->head_dim / 16;
    long row = d->rows[sequence], start = d->starts[sequence], stop = d->stops[sequence];
    const int64_t *table = d->tables + sequence * d->width;
    Head heads[MAX_HEADS];
    for (long h = 0; h < (to - from) * group; h++) {
        const bf16 *query = d->query + row * d->query_row + (from * group + h) * d->query_head;
        for (long v = 0; v < vectors; v++) {
            heads[h].query[v] = widen16(query + 16 * v) * d->scale;
            heads[h].mixed[v] = (floats){0};
        }
        heads[h].largest = -1e30f, heads[h].total = (floats){0};
    }
    for (long i = start / d->block_size; i * d->block_size < stop; i++) {
        long begin = i * d->block_size < start ? start % d->block_size : 0;
        long end = stop - i * d->block_size < d->block_size ? stop - i * d->block_size : d->block_size;
        long ahead = (i + 1) * d->block_size < stop ? (table[i + 1] - table[i]) * d->block : 0;
        for (long h = from; h < to; h++) {
            const bf16 *keys = d->keys + table[i] * d->block + h * d->head_dim;
            const bf16 *values = d->values + table[i] * d->block + h * d->head_dim;
            Head *some = heads + (h - from) * group;
            if (vectors == 4) attend_block(d, some, keys, values, ahead, begin, end, 4);
            else if (vectors == 8) attend_block(d, some, keys, values, ahead, begin, end, 8);
            else attend_block(d, some, keys, values, ahead, begin, end, vectors);
        }
    }
    for (long h = 0; h < (to - from) * group; h++) {
        bf16 *output = d->output + (row * d->heads + from * group + h) * d->head_dim;
        float share = 1 / reduce(heads[h].total, 0);
        for (long v = 0; v < vectors; v++)
            for (long i = 0; i < 16; i++) output[16 * v + i] = narrow(heads[h].mixed[v][i] * share);
    }
}

/* Computes the attention of decodes. It reads the blocks in place, so nothing is gathered. */
void baton_decode_attention(const Decode *d) {
    /* If there are few sequences, each key head of a sequence is a work item, so that every thread has work. */
    long parts = d->batch >= 2 * d->threads ? 1 : d->kv_heads;
#pragma omp parallel for num_threads(d->threads) schedule(dynamic)
    for (long item = 0; item < d->batch * parts; item++) {
        long part = item % parts;
        attend(d, item / parts, part * d->kv_heads / parts, (part + 1) * d->kv_heads / parts);
    }
}

/* -- norms, gates and rotary positions, rounded to bfloat16 wherever transformers rounds --------------------------- */

static void normalise(const bf16 *x, const bf16 *weight, bf16 *y, long dim, float epsilon, float offset) {
    float squares = 0;
    for (long i = 0; i < dim; i++) squares += widen(x[i]) * widen(x[i]);
    float scale = 1.0f / __builtin_sqrtf(squares / (float)dim + epsilon);
    if (offset == 0)
        for (long i = 0; i < dim; i++) y[i] = narrow(widen(narrow(widen(x[i]) * scale)) * widen(weight[i]));
    else
        for (long i = 0; i < dim; i++) y[i] = narrow(widen(x[i]) * scale * (offset + widen(weight[i])));
}

/* Computes y, the root mean square norm (arXiv 1910.07467) of x; both are [rows, dim]. With offset 0 the normalised row
 * is rounded and multiplied by weight [dim], as in Llama; with offset 1 it is multiplied by 1 + weight, as in Gemma. */
void baton_rms_norm(
    const bf16 *x, const bf16 *weight, bf16 *y, long rows, long dim, float epsilon, float offset, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * dim > 65536)
    for (long row = 0; row < rows; row++) normalise(x + row * dim, weight, y + row * dim, dim, epsilon, offset);
}

static void add(bf16 *x, const bf16 *more, long count) {
    for (long i = 0; i < count; i++) x[i] = narrow(widen(x[i]) + widen(more[i]));
}

/* Computes x += more, then y = norm(x) as baton_rms_norm does; all are [rows, dim]. */
void baton_add_rms_norm(
    bf16 *x, const bf16 *more, const bf16 *weight, bf16 *y, long rows, long dim, float epsilon, float offset,
    int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * dim > 65536)
    for (long row = 0; row < rows; row++) {
        add(x + row * dim, more + row * dim, dim);
        normalise(x + row * dim, weight, y + row * dim, dim, epsilon, offset);
    }
}

static void gate(const bf16 *gates, const bf16 *x, bf16 *y, long count) {
    for (long i = 0; i < count; i++) {
        float value = widen(gates[i]);
        y[i] = narrow(widen(narrow(value / (1.0f + exponential(-value)))) * widen(x[i]));
    }
}

/* Computes y = silu(gates) * x (SwiGLU, arXiv 2002.05202) for [rows, dim] elements. Rows of gates and x are `stride`
 * elements apart; y is contiguous. */
void baton_silu_gate(const bf16 *gates, const bf16 *x, bf16 *y, long rows, long dim, long stride, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * dim > 65536)
    for (long row = 0; row < rows; row++) gate(gates + row * stride, x + row * stride, y + row * dim, dim);
}

/* Rotates element i of each head against element i + dim / 2, as transformers does for Llama. */
static void rotate(bf16 *x, const bf16 *cosines, const bf16 *sines, long heads, long dim) {
    long half = dim / 2;
    for (long h = 0; h < heads; h++, x += dim)
        for (long i = 0; i < half; i++) {
            float low = widen(x[i]), high = widen(x[i + half]);
            x[i] = narrow(widen(narrow(low * widen(cosines[i]))) - widen(narrow(high * widen(sines[i]))));
            x[i + half] =
                narrow(widen(narrow(high * widen(cosines[i + half]))) + widen(narrow(low * widen(sines[i + half]))));
        }
}

/* Applies rotary position embeddings (RoPE, arXiv 2104.09864) in place to the first `heads` heads of each row. Rows are
 * `stride` elements apart, and the heads of a row are contiguous. cosines, sines: [rows, dim]. */
void baton_rotate(
    bf16 *x, const bf16 *cosines, const bf16 *sines, long rows, long heads, long dim, long stride, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * heads * dim > 65536)
    for (long row = 0; row < rows; row++) rotate(x + row * stride, cosines + row * dim, sines + row * dim, heads, dim);
}

/* -- attention weights of a chunk ---------------------------------------------------------------------------------- */

/* Computes the softmax of x[begin] ... x[end - 1] in place, and sets the other elements of x[0] ... x[count - 1]
 * to 0. */
static void softmax(bf16 *x, long begin, long end, long count) {
    float powers[MOST_KEPT], highest = -1e30f, sum = 0;
    for (long i = begin; i < end; i++) highest = widen(x[i]) > highest ? widen(x[i]) : highest;
    int keep = end - begin <= MOST_KEPT; /* if not, exponentials are computed once for the sum and once for x */
    if (keep)
        for (long i = begin; i < end; i++) sum += powers[i - begin] = exponential(widen(x[i]) - highest);
    else
        for (long i = begin; i < end; i++) sum += exponential(widen(x[i]) - highest);
    float share = 1 / sum;
    if (keep)
        for (long i = begin; i < end; i++) x[i] = narrow(powers[i - begin] * share);
    else
        for (long i = begin; i < end; i++) x[i] = narrow(exponential(widen(x[i]) - highest) * share);
    memset(x, 0, (size_t)begin * sizeof *x);
    memset(x + end, 0, (size_t)(count - end) * sizeof *x);
}

/* Computes the softmax of scores [tiles, queries, keys] in place. Query q sees the keys first + q ... last + q, as far
 * as they are within 0 ... keys - 1; the weights of the others become 0. */
void baton_causal_softmax(bf16 *scores, long tiles, long queries, long keys, long first, long last, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 16)
    for (long row = 0; row < tiles * queries; row++) {
        long begin = first + row % queries, end = last + row % queries + 1;
        softmax(scores + row * keys, begin < 0 ? 0 : begin, end < keys ? end : keys, keys);
    }
}
