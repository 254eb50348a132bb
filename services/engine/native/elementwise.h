/* Declares the kernels of elementwise.c and attention.c for those that call them from C. */
#pragma once
#include "elements.h"

void NAME(rms_norm)(
    const element *x, const element *weight, element *y, long rows, long dim, float epsilon, float offset, int threads);
void NAME(add_rms_norm)(
    element *x, const element *more, const element *weight, element *y, long rows, long dim, float epsilon,
    float offset, int threads);
void NAME(add_rows)(element *x, const element *more, long rows, long dim, int threads);
void NAME(silu_gate)(
    const element *gates, const element *x, element *y, long rows, long dim, long stride, int threads);
void NAME(rotate)(
    element *x, const element *cosines, const element *sines, long rows, long heads, long dim, long stride,
    int threads);

/* attention: the arguments of attention.c, of which only that file knows more. */
void NAME(attention)(const void *attention);
