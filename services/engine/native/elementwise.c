/* Computes norms, gates, rotary positions and sums of a layer, each in one pass where torch takes several operators.
 *
 * Results are rounded to the tensor's type wherever transformers rounds them, so they differ from its results by no
 * more than another order of sums makes. For how threads are shared with torch, see attention.c.
 */
#include "elements.h"

/* Elements from which on threads share the work: for fewer, waking them takes longer. */
#define MANY 65536

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

/* Computes the root mean square norm (arXiv 1910.07467). offset 0: Llama's; 1: Gemma's, whose weights are about 0. */
void NAME(rms_norm)(
    const element *x, const element *weight, element *y, long rows, long dim, float epsilon, float offset,
    int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * dim > MANY)
    for (long row = 0; row < rows; row++) normalise(x + row * dim, weight, y + row * dim, dim, epsilon, offset);
}

static void add(element *x, const element *more, long count) {
    for (long i = 0; i < count; i += LANES)
        narrow_some(widen_some(x + i, count - i) + widen_some(more + i, count - i), x + i, count - i);
}

/* Computes x += more, then y = norm(x). */
void NAME(add_rms_norm)(
    element *x, const element *more, const element *weight, element *y, long rows, long dim, float epsilon,
    float offset, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * dim > MANY)
    for (long row = 0; row < rows; row++) {
        add(x + row * dim, more + row * dim, dim);
        normalise(x + row * dim, weight, y + row * dim, dim, epsilon, offset);
    }
}

static void gate(const element *gates, const element *x, element *y, long count) {
    for (long i = 0; i < count; i += LANES) {
        floats values = widen_some(gates + i, count - i);
        floats passed = rounded(values / (1.0f + exponentials(-values)));
        narrow_some(passed * widen_some(x + i, count - i), y + i, count - i);
    }
}

/* Computes y = silu(gates) * x, `rows` times `dim` elements; rows of gates and x lie `stride` elements apart. */
void NAME(silu_gate)(
    const element *gates, const element *x, element *y, long rows, long dim, long stride, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * dim > MANY)
    for (long row = 0; row < rows; row++) gate(gates + row * stride, x + row * stride, y + row * dim, dim);
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

/* Applies rotary positions (arXiv 2104.09864) in place to `heads` heads, side by side in rows `stride` elements apart.
 * cosines, sines: [rows, dim]. */
void NAME(rotate)(
    element *x, const element *cosines, const element *sines, long rows, long heads, long dim, long stride,
    int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * heads * dim > MANY)
    for (long row = 0; row < rows; row++) rotate(x + row * stride, cosines + row * dim, sines + row * dim, heads, dim);
}
