/* Multiplies by weights of 16 or 32 bits: y[rows, out] = x[rows, in] W^T + bias. Sums are in float.
 *
 * Weights lie in panels of 32 output columns: [panels][in][32], and in bfloat16 [panels][in / 2][32][2], so that a
 * processor that multiplies pairs reads them as they are. Columns beyond the last are zeros; `in` is even.
 * `services/engine/cpu/packed_linear.py` writes this form.
 *
 * x and y have the type of the weights or are float. Weights that were saved in 16 bits are the same numbers in float,
 * so a model that computes in float keeps them in 16 bits: a decode, which is bound by the memory, then takes half the
 * time, and its results are those of float weights. For threads see attention.c.
 */
#include "elements.h"
#include "threads.h"
#include <stdlib.h>

#define PANEL 32
#define WHOLE (PANEL / LANES) /* vectors of columns of a panel */
#define WIDE 2 /* vectors of columns of a tile */
#if LANES == 16
#define TALL 12 /* rows of a tile: as many as leave their sums in registers */
#else
#define TALL 6
#endif
#define FEW 4         /* up to so many rows, weights become float in registers, each once */
#define BLOCK_ROWS 96 /* rows, and inputs below, of a block, whose x stays in a core's second cache */
#define BLOCK_IN 512

#if defined(BFLOAT16)
#define PAIRS 2 /* neighbouring inputs that lie side by side */
#else
#define PAIRS 1
#endif
#if defined(BFLOAT16) && defined(__AVX512BF16__)
#define MULTIPLIES_PAIRS 1
#else
#define MULTIPLIES_PAIRS 0
#endif

typedef struct {
    const void *x;         /* [rows, in] */
    void *y;               /* [rows, out] */
    const element *panels;
    const float *bias;     /* [out], or null */
    long rows, in, out;
    int in_float;          /* x and y are float */
    int threads;
} Linear;

/* Weights of inputs i ... i + PAIRS - 1 and LANES columns, of the panel's part that begins with `column`. */
FORCED void weights_at(const element *panel, long i, long column, floats *found) {
#if defined(BFLOAT16)
    words both = *(const words *)(panel + (i / 2 * PANEL + column) * 2);
    found[0] = (floats)(both << 16);
    found[1] = (floats)(both & 0xffff0000u);
#else
    found[0] = widen_lanes(panel + i * PANEL + column);
#endif
}

static void store(const Linear *p, long row, long column, const float *sums) {
    long count = p->out - column < PANEL ? p->out - column : PANEL;
    float with_bias[PANEL];
    if (p->bias) {
        for (long i = 0; i < count; i++) with_bias[i] = sums[i] + p->bias[column + i];
        sums = with_bias;
    }
    if (p->in_float) {
        memcpy((float *)p->y + row * p->out + column, sums, (size_t)count * sizeof *sums);
        return;
    }
    element *y = (element *)p->y + row * p->out + column;
    for (long i = 0; i < count; i += LANES) {
        floats values;
        memcpy(&values, sums + i, sizeof values);
        narrow_some(values, y + i, count - i);
    }
}

/* -- few rows: weights pass by once --------------------------------------------------------------------------------- */

/* `wide`: vectors of columns at a time. */
FORCED void few(const Linear *p, const float *x, long panel, const long rows, const long wide) {
    const element *weights = p->panels + panel * p->in * PANEL;
    float sums[FEW][PANEL];
    for (long column = 0; column < PANEL; column += wide * LANES) {
        floats totals[FEW][PANEL / LANES];
        UNROLLED for (long r = 0; r < rows; r++)
            UNROLLED for (long v = 0; v < wide; v++) totals[r][v] = (floats){0};
        for (long i = 0; i < p->in; i += PAIRS) {
            floats w[PANEL / LANES][PAIRS];
            UNROLLED for (long v = 0; v < wide; v++) weights_at(weights, i, column + v * LANES, w[v]);
            UNROLLED for (long r = 0; r < rows; r++)
                UNROLLED for (long q = 0; q < PAIRS; q++)
                    UNROLLED for (long v = 0; v < wide; v++) totals[r][v] += w[v][q] * x[r * p->in + i + q];
        }
        UNROLLED for (long r = 0; r < rows; r++)
            UNROLLED for (long v = 0; v < wide; v++) *(floats *)(sums[r] + column + v * LANES) = totals[r][v];
    }
    for (long r = 0; r < rows; r++) store(p, r, panel * PANEL, sums[r]);
}

/* -- many rows: weights of a block become float, then serve all its rows --------------------------------------------- */

/* Adds to sums[TALL][PANEL] the products of `rows` rows and `count` inputs. */
FORCED void tile(const float *x, long stride, const float *weights, long count, float *sums, const long rows) {
    for (long column = 0; column < PANEL; column += WIDE * LANES) {
        floats totals[TALL][WIDE];
        UNROLLED for (long r = 0; r < rows; r++)
            UNROLLED for (long v = 0; v < WIDE; v++)
                totals[r][v] = *(const floats *)(sums + r * PANEL + column + v * LANES);
        for (long i = 0; i < count; i++) {
            floats w[WIDE];
            UNROLLED for (long v = 0; v < WIDE; v++) w[v] = *(const floats *)(weights + i * PANEL + column + v * LANES);
            UNROLLED for (long r = 0; r < rows; r++)
                UNROLLED for (long v = 0; v < WIDE; v++) totals[r][v] += w[v] * x[r * stride + i];
        }
        UNROLLED for (long r = 0; r < rows; r++)
            UNROLLED for (long v = 0; v < WIDE; v++)
                *(floats *)(sums + r * PANEL + column + v * LANES) = totals[r][v];
    }
}

static void to_float(const element *panel, long first, long count, float *weights) {
    for (long i = 0; i < count; i += PAIRS)
        for (long column = 0; column < PANEL; column += LANES) {
            floats w[PAIRS];
            weights_at(panel, first + i, column, w);
            UNROLLED for (long q = 0; q < PAIRS; q++) *(floats *)(weights + (i + q) * PANEL + column) = w[q];
        }
}

static void many(const Linear *p, const float *x, long row, long rows, long panel) {
    const element *weights = p->panels + panel * p->in * PANEL;
    float as_float[BLOCK_IN * PANEL] __attribute__((aligned(64)));
    float sums[BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
    memset(sums, 0, (size_t)(rows * PANEL) * sizeof *sums);
    for (long first = 0; first < p->in; first += BLOCK_IN) {
        long count = p->in - first < BLOCK_IN ? p->in - first : BLOCK_IN;
        to_float(weights, first, count, as_float);
        const float *of_row = x + row * p->in + first;
        long r = 0;
        for (; r + TALL <= rows; r += TALL) tile(of_row + r * p->in, p->in, as_float, count, sums + r * PANEL, TALL);
        for (; r + TALL / 2 <= rows; r += TALL / 2)
            tile(of_row + r * p->in, p->in, as_float, count, sums + r * PANEL, TALL / 2);
        for (; r + 2 <= rows; r += 2) tile(of_row + r * p->in, p->in, as_float, count, sums + r * PANEL, 2);
        for (; r < rows; r++) tile(of_row + r * p->in, p->in, as_float, count, sums + r * PANEL, 1);
    }
    for (long r = 0; r < rows; r++) store(p, row + r, panel * PANEL, sums + r * PANEL);
}

/* -- pairs of bfloat16, where the processor multiplies them ---------------------------------------------------------- */

#if MULTIPLIES_PAIRS
FORCED void pairs_tile(const Linear *p, long row, long panel, const long rows) {
    const element *weights = p->panels + panel * p->in * PANEL;
    const element *x = (const element *)p->x + row * p->in;
    __m512 totals[TALL][WIDE];
    UNROLLED for (long r = 0; r < rows; r++)
        UNROLLED for (long v = 0; v < WIDE; v++) totals[r][v] = _mm512_setzero_ps();
    for (long i = 0; i < p->in; i += 2) {
        __m512bh w[WIDE];
        UNROLLED for (long v = 0; v < WIDE; v++)
            w[v] = (__m512bh)_mm512_loadu_si512(weights + i * PANEL + 2 * v * LANES);
        UNROLLED for (long r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, x + r * p->in + i, sizeof pair);
            __m512bh inputs = (__m512bh)_mm512_set1_epi32(pair);
            UNROLLED for (long v = 0; v < WIDE; v++) totals[r][v] = _mm512_dpbf16_ps(totals[r][v], inputs, w[v]);
        }
    }
    float sums[PANEL];
    UNROLLED for (long r = 0; r < rows; r++) {
        UNROLLED for (long v = 0; v < WIDE; v++) _mm512_storeu_ps(sums + v * LANES, totals[r][v]);
        store(p, row + r, panel * PANEL, sums);
    }
}

static void pairs(const Linear *p, long row, long rows, long panel) {
    long end = row + rows;
    for (; row + TALL <= end; row += TALL) pairs_tile(p, row, panel, TALL);
    switch (end - row) {
    case 11: pairs_tile(p, row, panel, 11); break;
    case 10: pairs_tile(p, row, panel, 10); break;
    case 9: pairs_tile(p, row, panel, 9); break;
    case 8: pairs_tile(p, row, panel, 8); break;
    case 7: pairs_tile(p, row, panel, 7); break;
    case 6: pairs_tile(p, row, panel, 6); break;
    case 5: pairs_tile(p, row, panel, 5); break;
    case 4: pairs_tile(p, row, panel, 4); break;
    case 3: pairs_tile(p, row, panel, 3); break;
    case 2: pairs_tile(p, row, panel, 2); break;
    case 1: pairs_tile(p, row, panel, 1); break;
    }
}
#endif

/* -- all of them ----------------------------------------------------------------------------------------------------- */

static void block(const Linear *p, const float *x, long row, long panel) {
    long rows = p->rows - row < BLOCK_ROWS ? p->rows - row : BLOCK_ROWS;
#if MULTIPLIES_PAIRS
    if (!p->in_float) {
        pairs(p, row, rows, panel);
        return;
    }
#endif
    if (p->rows > FEW) {
        many(p, x, row, rows, panel);
        return;
    }
    switch (rows) {
    case 1: few(p, x, panel, 1, WHOLE); break;
    case 2: few(p, x, panel, 2, WHOLE < 4 ? WHOLE : 4); break;
    case 3: few(p, x, panel, 3, WIDE); break;
    case 4: few(p, x, panel, 4, WIDE); break;
    }
}

typedef struct {
    const Linear *linear;
    const float *x;
    float *copy;
    long panels;
} Job;

#if !defined(FLOAT32)
static void widen_rows(const void *data, long from, long to) {
    const Job *job = data;
    long in = job->linear->in;
    for (long row = from; row < to; row++)
        for (long i = 0; i < in; i += LANES) {
            floats values = widen_some((const element *)job->linear->x + row * in + i, in - i);
            long left = in - i < LANES ? in - i : LANES;
            memcpy(job->copy + row * in + i, &values, (size_t)left * sizeof(float));
        }
}
#endif

static void multiply_blocks(const void *data, long from, long to) {
    const Job *job = data;
    for (long each = from; each < to; each++)
        block(job->linear, job->x, each / job->panels * BLOCK_ROWS, each % job->panels);
}

/* Returns 0, or 1 if there is no memory for x in float. */
int NAME(linear)(const Linear *p) {
    long panels = (p->out + PANEL - 1) / PANEL, blocks = (p->rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    Job job = {p, p->x, 0, panels};
#if !defined(FLOAT32)
    if (!p->in_float && !MULTIPLIES_PAIRS) {
        job.x = job.copy = malloc((size_t)(p->rows * p->in) * sizeof(float));
        if (!job.copy) return 1;
        share_evenly(widen_rows, &job, p->rows, p->threads, p->rows * p->in > 65536);
    }
#endif
    /* Blocks of one set of rows follow each other, so that their x stays in the cache. */
    share(multiply_blocks, &job, blocks * panels, panels / (8 * p->threads) + 1, panels > 1 ? p->threads : 1);
    free(job.copy);
    return 0;
}
