/* CPU kernels in bfloat16 for what torch does in many small operators, or only after copying: decodes' attention over
 * paged blocks, norms, gates. Matrix products stay with oneDNN.
 *
 * Plain C: no headers of torch, so one library serves any of its versions. OpenMP's runtime is not linked either: its
 * symbols are found in the one that torch has loaded, so that both share one pool of threads.
 * Inner loops are compiled for several instruction sets, and the loader picks (target_clones). All sums are in float32.
 */
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), noinline))
#else
#define CLONES __attribute__((noinline))
#endif

#define MAX_HEADS 128
#define MAX_VECTORS 16 /* of 16 elements: a head dimension of 256 */
#define MAX_BLOCK 64

typedef uint16_t bf16;

static inline float widen(bf16 value) {
    union { uint32_t bits; float number; } wide = {.bits = (uint32_t)value << 16};
    return wide.number;
}

static inline bf16 narrow(float value) { /* to nearest, ties to even; not for NaN */
    union { float number; uint32_t bits; } wide = {.number = value};
    return (bf16)((wide.bits + 0x7fff + ((wide.bits >> 16) & 1)) >> 16);
}

static inline float exponential(float x) { /* for -87 <= x <= 87; a form that compilers vectorise */
    x = x < -87.0f ? -87.0f : x > 87.0f ? 87.0f : x;
    float scaled = x * 1.44269504f;
    int32_t whole = (int32_t)(scaled + (scaled < 0 ? -0.5f : 0.5f));
    float rest = x - (float)whole * 0.693147182f;
    float sum = 1.0f + rest * (1.0f + rest * (0.5f + rest * (0.166666667f + rest * (0.0416666667f +
                rest * (0.00833333333f + rest * 0.00138888889f)))));
    union { int32_t bits; float number; } power = {.bits = (whole + 127) << 23};
    return sum * power.number;
}

/* -- attention of one new token per sequence over its blocks ------------------------------------------------------- */

typedef struct {
    const bf16 *query, *keys, *values;
    bf16 *output;
    const int64_t *rows;   /* [batch]: where the sequence's token stands in query and output */
    const int64_t *tables; /* [batch, width] */
    const int64_t *starts, *stops; /* [batch]: visible tokens, counted from the table's first */
    long batch, width, heads, kv_heads, head_dim, block_size;
    long query_row, query_head, block, token; /* strides, in elements; output is [rows, heads, head_dim] */
    float scale, softcap; /* softcap 0: none */
    int threads;
} Decode;

typedef float floats __attribute__((vector_size(64), aligned(4)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef bf16 halves __attribute__((vector_size(32), aligned(2)));

static inline floats widen16(const bf16 *from) {
    words wide = __builtin_convertvector(*(const halves *)from, words) << 16;
    floats result;
    memcpy(&result, &wide, sizeof result);
    return result;
}

static inline float sum16(floats parts) {
    typedef float eight __attribute__((vector_size(32)));
    typedef float four __attribute__((vector_size(16)));
    union { floats whole; eight half[2]; } by16 = {parts};
    union { eight whole; four half[2]; } by8 = {by16.half[0] + by16.half[1]};
    four sums = by8.half[0] + by8.half[1];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

static inline void fetch(const bf16 *from, long count) {
    for (long i = 0; i < count; i += 32) __builtin_prefetch(from + i, 0, 3);
}

/* What a query head carries from block to block of an online softmax (Milakov and Gimelshein, arXiv 1805.02867). */
typedef struct {
    floats query[MAX_VECTORS], mixed[MAX_VECTORS];
    float largest, total;
} Head;

/* Tokens begin ... end - 1 of one block, for `group` query heads over one key head. vectors = head_dim / 16.
 * Inlined with constants, so that sums stay in registers. */
static inline __attribute__((always_inline)) void attend_group(
    const Decode *d, Head *heads, const bf16 *keys, const bf16 *values, long begin, long end, const long group,
    const long vectors) {
    float weights[4][MAX_BLOCK];
    for (long t = begin; t < end; t++) {
        floats scores[4] = {0};
        for (long v = 0; v < vectors; v++) {
            floats key = widen16(keys + t * d->token + 16 * v);
            for (long g = 0; g < group; g++) scores[g] += heads[g].query[v] * key;
        }
        for (long g = 0; g < group; g++) weights[g][t] = sum16(scores[g]);
    }
    for (long g = 0; g < group; g++) {
        float before = heads[g].largest, highest = before, sum = 0;
        if (d->softcap != 0)
            for (long t = begin; t < end; t++) {
                float e = exponential(2 * weights[g][t] / d->softcap);
                weights[g][t] = d->softcap * (e - 1) / (e + 1);
            }
        for (long t = begin; t < end; t++) highest = weights[g][t] > highest ? weights[g][t] : highest;
        float shrink = exponential(before - highest);
        for (long t = begin; t < end; t++) sum += weights[g][t] = exponential(weights[g][t] - highest);
        for (long v = 0; v < vectors; v++) heads[g].mixed[v] *= shrink;
        heads[g].total = heads[g].total * shrink + sum;
        heads[g].largest = highest;
    }
    for (long v = 0; v < vectors; v++) {
        floats mixed[4];
        for (long g = 0; g < group; g++) mixed[g] = heads[g].mixed[v];
        for (long t = begin; t < end; t++) {
            floats value = widen16(values + t * d->token + 16 * v);
            for (long g = 0; g < group; g++) mixed[g] += weights[g][t] * value;
        }
        for (long g = 0; g < group; g++) heads[g].mixed[v] = mixed[g];
    }
}

static inline __attribute__((always_inline)) void attend_block(
    const Decode *d, Head *heads, const bf16 *keys, const bf16 *values, long begin, long end, const long vectors) {
    long left = d->heads / d->kv_heads;
    for (; left >= 4; left -= 4, heads += 4) attend_group(d, heads, keys, values, begin, end, 4, vectors);
    if (left == 3) attend_group(d, heads, keys, values, begin, end, 3, vectors);
    if (left == 2) attend_group(d, heads, keys, values, begin, end, 2, vectors);
    if (left == 1) attend_group(d, heads, keys, values, begin, end, 1, vectors);
}

/* Key heads `from` ... `to` - 1 of one sequence. All of a block's heads in turn: they lie side by side. */
CLONES static void attend(const Decode *d, long sequence, long from, long to) {
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
        heads[h].largest = -1e30f, heads[h].total = 0;
    }
    for (long i = start / d->block_size; i * d->block_size < stop; i++) {
        long begin = i * d->block_size < start ? start % d->block_size : 0;
        long end = stop - i * d->block_size < d->block_size ? stop - i * d->block_size : d->block_size;
        if ((i + 1) * d->block_size < stop) { /* blocks lie anywhere: the hardware cannot foresee the next */
            fetch(d->keys + table[i + 1] * d->block, d->block_size * d->token);
            fetch(d->values + table[i + 1] * d->block, d->block_size * d->token);
        }
        for (long h = from; h < to; h++) {
            const bf16 *keys = d->keys + table[i] * d->block + h * d->head_dim;
            const bf16 *values = d->values + table[i] * d->block + h * d->head_dim;
            Head *some = heads + (h - from) * group;
            if (vectors == 4) attend_block(d, some, keys, values, begin, end, 4);
            else if (vectors == 8) attend_block(d, some, keys, values, begin, end, 8);
            else attend_block(d, some, keys, values, begin, end, vectors);
        }
    }
    for (long h = 0; h < (to - from) * group; h++) {
        bf16 *output = d->output + (row * d->heads + from * group + h) * d->head_dim;
        for (long v = 0; v < vectors; v++)
            for (long i = 0; i < 16; i++) output[16 * v + i] = narrow(heads[h].mixed[v][i] / heads[h].total);
    }
}

void baton_decode_attention(const Decode *d) {
    /* Few sequences are divided further, by key heads, so that every thread has some. */
    long parts = d->batch >= 2 * d->threads ? 1 : d->kv_heads;
#pragma omp parallel for num_threads(d->threads) schedule(dynamic)
    for (long item = 0; item < d->batch * parts; item++) {
        long part = item % parts;
        attend(d, item / parts, part * d->kv_heads / parts, (part + 1) * d->kv_heads / parts);
    }
}

/* -- element by element, rounded where transformers rounds --------------------------------------------------------- */

CLONES static void normalise(const bf16 *x, const bf16 *weight, bf16 *y, long dim, float epsilon, float offset) {
    float squares = 0;
    for (long i = 0; i < dim; i++) squares += widen(x[i]) * widen(x[i]);
    float scale = 1.0f / __builtin_sqrtf(squares / (float)dim + epsilon);
    if (offset == 0)
        for (long i = 0; i < dim; i++) y[i] = narrow(widen(narrow(widen(x[i]) * scale)) * widen(weight[i]));
    else
        for (long i = 0; i < dim; i++) y[i] = narrow(widen(x[i]) * scale * (offset + widen(weight[i])));
}

/* Root mean square norm (arXiv 1910.07467). offset 0: Llama's; 1: Gemma's, whose weights are about zero. */
void baton_rms_norm(
    const bf16 *x, const bf16 *weight, bf16 *y, long rows, long dim, float epsilon, float offset, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * dim > 65536)
    for (long row = 0; row < rows; row++) normalise(x + row * dim, weight, y + row * dim, dim, epsilon, offset);
}

CLONES static void gate(const bf16 *gates, const bf16 *x, bf16 *y, long count) {
    for (long i = 0; i < count; i++) {
        float value = widen(gates[i]);
        y[i] = narrow(widen(narrow(value / (1.0f + exponential(-value)))) * widen(x[i]));
    }
}

/* y = silu(gates) * x, all of `rows` times `dim` elements. */
void baton_silu_gate(const bf16 *gates, const bf16 *x, bf16 *y, long rows, long dim, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * dim > 65536)
    for (long row = 0; row < rows; row++) gate(gates + row * dim, x + row * dim, y + row * dim, dim);
}
