/* Computes all layers of a Llama-like decoder in one call: nothing of Python runs between two kernels.
 *
 * It calls the kernels of the other files with the same numbers in the same order as a `NativeDecoderLayer` does
 * (`services/engine/cpu/decoder_layer.py`), so that results are equal bit by bit. Linear layers are called through
 * pointers, whichever kernel computes them. For threads see attention.c.
 */
#include "elementwise.h"
#include <time.h>

typedef struct { /* a linear layer: its kernel, the kernel's arguments, and what of these differs from step to step */
    int (*multiply)(const void *arguments); /* returns 0, or 1 if there is no memory */
    const void *arguments;
    const void **x;
    void **y;
    long *rows;
    int *threads;
} Product;

typedef struct {
    const element *weight;
    float epsilon, offset;
} Norm;

typedef struct {
    Norm input_norm, inner_norm;
    Product qkv, output, gate_up, down;
} Layer;

typedef struct {
    const Layer *layers;
    void *attention; /* arguments of attention: all but keys and values are set */
    const element **keys, **values; /* these, in the arguments */
    element *pool;         /* the first layer's keys in block 0 */
    const int64_t *places; /* [rows]: where in a layer's keys the row's begins, in elements */
    long count, key_stride, values_at; /* elements from one layer to the next; from a layer's keys to its values */
    element *x;             /* [rows, dim]: input and output */
    const element *cosines, *sines; /* [rows, head_dim] */
    element *normed, *more; /* [rows, dim] each; from here on: memory for what is between two kernels */
    element *qkv;           /* [rows, (heads + 2 * kv_heads) * head_dim] */
    element *mixed;         /* [rows, heads * head_dim] */
    element *gates, *gated; /* [rows, 2 * inner], [rows, inner] */
    long rows, dim, heads, kv_heads, head_dim, inner;
    double *seconds; /* [KINDS + 1]: what kernels of each kind take is added, and the last is the time; or null */
    int threads;
} Layers;

enum { PRODUCTS, ATTENTION, ELEMENTWISE, KINDS };

static void note(const Layers *l, int kind) {
    struct timespec now;
    if (!l->seconds) return;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    if (kind < KINDS) l->seconds[kind] += seconds - l->seconds[KINDS];
    l->seconds[KINDS] = seconds;
}

static int multiply(const Layers *l, const Product *product, const element *x, element *y) {
    *product->x = x, *product->y = y, *product->rows = l->rows, *product->threads = l->threads;
    int failed = product->multiply(product->arguments);
    note(l, PRODUCTS);
    return failed;
}

/* Computes y = norm(x), after x += more if there is more. */
static void normalise(const Layers *l, const Norm *norm, const element *more) {
    if (more)
        NAME(add_rms_norm)(
            l->x, more, norm->weight, l->normed, l->rows, l->dim, norm->epsilon, norm->offset, l->threads);
    else NAME(rms_norm)(l->x, norm->weight, l->normed, l->rows, l->dim, norm->epsilon, norm->offset, l->threads);
    note(l, ELEMENTWISE);
}

static void attend(const Layers *l, long layer) {
    element *keys = l->pool + layer * l->key_stride, *values = keys + l->values_at;
    long width = l->kv_heads * l->head_dim, row = (l->heads + 2 * l->kv_heads) * l->head_dim;
    const element *key = l->qkv + l->heads * l->head_dim;
    NAME(rotate)(
        l->qkv, l->cosines, l->sines, l->rows, l->heads + l->kv_heads, l->head_dim, row, l->threads);
    note(l, ELEMENTWISE);
    for (long r = 0; r < l->rows; r++, key += row) {
        memcpy(keys + l->places[r], key, (size_t)width * sizeof *key);
        memcpy(values + l->places[r], key + width, (size_t)width * sizeof *key);
    }
    *l->keys = keys, *l->values = values;
    NAME(attention)(l->attention);
    note(l, ATTENTION);
}

/* Returns 0, or 1 if there is no memory. */
int NAME(layers)(const Layers *l) {
    note(l, KINDS);
    for (long i = 0; i < l->count; i++) {
        const Layer *layer = l->layers + i;
        normalise(l, &layer->input_norm, i ? l->more : 0);
        if (multiply(l, &layer->qkv, l->normed, l->qkv)) return 1;
        attend(l, i);
        if (multiply(l, &layer->output, l->mixed, l->more)) return 1;
        normalise(l, &layer->inner_norm, l->more);
        if (multiply(l, &layer->gate_up, l->normed, l->gates)) return 1;
        NAME(silu_gate)(l->gates, l->gates + l->inner, l->gated, l->rows, l->inner, 2 * l->inner, l->threads);
        note(l, ELEMENTWISE);
        if (multiply(l, &layer->down, l->gated, l->more)) return 1;
    }
    if (l->count) NAME(add_rows)(l->x, l->more, l->rows, l->dim, l->threads);
    note(l, ELEMENTWISE);
    return 0;
}
