/* Rounds rows of keys and values to 8 bits, byte for byte as attention/int8_rows.py describes it. */
#include "elements.h"
#include "threads.h"

#define LEAST 1e-30f        /* the largest number of a row counts as no less: a row of zeros has a scale, too */
#define MOST 127.0f
#define TO_WHOLE 12582912.0f /* a float of this size has no bits for fractions: an addition rounds, ties to even */

typedef int8_t numbers __attribute__((vector_size(LANES), aligned(1), may_alias));

typedef struct {
    const element *rows; /* [count, dim] */
    int8_t *packed;      /* [count, dim + sizeof(float)] */
    long dim;
} Packing;

/* Compares magnitudes as whole numbers, among which that of a NaN is the largest. */
static float largest_of(const element *row, long dim) {
    ints largest = {0};
    for (long d = 0; d < dim; d += LANES) {
        ints bits = (ints)widen_some(row + d, dim - d) & 0x7fffffff, more = bits > largest;
        largest = (more & bits) | (~more & largest);
    }
    int32_t result = 0;
    for (long i = 0; i < LANES; i++) result = largest[i] > result ? largest[i] : result;
    float number;
    memcpy(&number, &result, sizeof number);
    return number < LEAST ? LEAST : number;
}

static void pack(const void *job, long from, long to) {
    const Packing *p = job;
    for (long r = from; r < to; r++) {
        const element *row = p->rows + r * p->dim;
        int8_t *packed = p->packed + r * (p->dim + (long)sizeof(float));
        float largest = largest_of(row, p->dim), factor = MOST / largest, scale = largest / MOST;
        for (long d = 0; d < p->dim; d += LANES) {
            floats wide = widen_some(row + d, p->dim - d) * factor + TO_WHOLE;
            numbers rounded = __builtin_convertvector((ints)wide, numbers); /* the lowest 8 bits of each */
            memcpy(packed + d, &rounded, p->dim - d < LANES ? (size_t)(p->dim - d) : sizeof rounded);
        }
        memcpy(packed + p->dim, &scale, sizeof scale);
    }
}

void NAME(pack_rows)(const element *rows, int8_t *packed, long count, long dim, int threads) {
    Packing packing = {rows, packed, dim};
    share_evenly(pack, &packing, count, threads, count * dim > 1 << 15);
}
