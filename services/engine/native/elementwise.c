/* Computes norms, gates, rotary positions and sums of a layer, each in one pass where torch takes several operators.
 *
 * Results are rounded to the tensor's type wherever transformers rounds them, so they differ from its results by no
 * more than another order of sums makes.
 */
#include "elementwise.h"
#include "threads.h"

/* Elements from which on threads share the work: for fewer, waking them takes longer. */
#define MANY 65536
#define MANY_GATES 8192 /* each takes an exponential, and a batch of 32 rows is worth it */

static void normalise(const element *x, const element *weight, element *y, long dim, float epsilon, float offset) {
    floats squares = {0};
    for (long i = 0; i < dim; i += LANES) {
        floats values = widen_some(x + i, dim - i);
        squares += values * values;
    }
    float scale = 1.0f / __builtin_sqrtf(sum_of_lanes(squares) / (float)dim + epsilon);
    for (long i = 0; i < dim; i += LANES) {
        floats values = widen_some(x + i, dim - i) * scale, weights = widen_some(weight + i, dim - i);
        narrow_some(offset == 0 ? rounded(values) * weights : values * (offset + weights), y + i, dim - i);
    }
}

typedef struct {
    element *x;
    const element *more, *weight; /* more: what is added to x before, or NULL */
    element *y;
    long dim;
    float epsilon, offset;
} Norm;

static void add(element *x, const element *more, long count) {
    for (long i = 0; i < count; i += LANES)
        narrow_some(widen_some(x + i, count - i) + widen_some(more + i, count - i), x + i, count - i);
}

static void normalise_rows(const void *job, long from, long to) {
    const Norm *n = job;
    for (long at = from * n->dim; at < to * n->dim; at += n->dim) {
        if (n->more) add(n->x + at, n->more + at, n->dim);
        normalise(n->x + at, n->weight, n->y + at, n->dim, n->epsilon, n->offset);
    }
}

/* Computes the root mean square norm (arXiv 1910.07467). offset 0: Llama's; 1: Gemma's, whose weights are about 0. */
void NAME(rms_norm)(
    const element *x, const element *weight, element *y, long rows, long dim, float epsilon, float offset,
    int threads) {
    Norm norm = {(element *)x, 0, weight, y, dim, epsilon, offset};
    share_evenly(normalise_rows, &norm, rows, threads, rows * dim > MANY);
}

/* Computes x += more, then y = norm(x). */
void NAME(add_rms_norm)(
    element *x, const element *more, const element *weight, element *y, long rows, long dim, float epsilon,
    float offset, int threads) {
    Norm norm = {x, more, weight, y, dim, epsilon, offset};
    share_evenly(normalise_rows, &norm, rows, threads, rows * dim > MANY);
}

typedef struct {
    element *x;
    const element *more;
    long dim;
} Sum;

static void add_some_rows(const void *job, long from, long to) {
    const Sum *s = job;
    add(s->x + from * s->dim, s->more + from * s->dim, (to - from) * s->dim);
}

/* Computes x += more, `rows` times `dim` elements. */
void NAME(add_rows)(element *x, const element *more, long rows, long dim, int threads) {
    Sum job = {x, more, dim};
    share_evenly(add_some_rows, &job, rows, threads, rows * dim > MANY);
}

static void gate(const element *gates, const element *x, element *y, long count) {
    for (long i = 0; i < count; i += LANES) {
        floats values = widen_some(gates + i, count - i);
        floats passed = rounded(values / (1.0f + exponentials(-values)));
        narrow_some(passed * widen_some(x + i, count - i), y + i, count - i);
    }
}

typedef struct {
    const element *gates, *x;
    element *y;
    long dim, stride;
} Gate;

static void gate_rows(const void *job, long from, long to) {
    const Gate *g = job;
    for (long row = from; row < to; row++)
        gate(g->gates + row * g->stride, g->x + row * g->stride, g->y + row * g->dim, g->dim);
}

/* Computes y = silu(gates) * x, `rows` times `dim` elements; rows of gates and x lie `stride` elements apart. */
void NAME(silu_gate)(
    const element *gates, const element *x, element *y, long rows, long dim, long stride, int threads) {
    Gate job = {gates, x, y, dim, stride};
    share_evenly(gate_rows, &job, rows, threads, rows * dim > MANY_GATES);
}

static void rotate(element *x, const element *cosines, const element *sines, long heads, long dim) {
    long half = dim / 2;
    for (long h = 0; h < heads; h++, x += dim)
        for (long i = 0; i < half; i += LANES) {
            long left = half - i;
            floats low = widen_some(x + i, left), high = widen_some(x + i + half, left);
            floats of_low = rounded(low * widen_some(cosines + i, left));
            floats of_high = rounded(high * widen_some(cosines + i + half, left));
            narrow_some(of_low - rounded(high * widen_some(sines + i, left)), x + i, left);
            narrow_some(of_high + rounded(low * widen_some(sines + i + half, left)), x + i + half, left);
        }
}

typedef struct {
    element *x;
    const element *cosines, *sines;
    long heads, dim, stride;
} Rotation;

static void rotate_rows(const void *job, long from, long to) {
    const Rotation *r = job;
    for (long row = from; row < to; row++)
        rotate(r->x + row * r->stride, r->cosines + row * r->dim, r->sines + row * r->dim, r->heads, r->dim);
}

/* Applies rotary positions (arXiv 2104.09864) in place to `heads` heads, side by side in rows `stride` elements apart.
 * cosines, sines: [rows, dim]. */
void NAME(rotate)(
    element *x, const element *cosines, const element *sines, long rows, long heads, long dim, long stride,
    int threads) {
    Rotation job = {x, cosines, sines, heads, dim, stride};
    share_evenly(rotate_rows, &job, rows, threads, rows * heads * dim > MANY);
}
