/* Defines how the pool keeps the row that a token has for a key head: as elements, or, with INT8_ROWS defined, as numbers
 * of 8 bits with their scale behind them, a float. attention/int8_rows.py describes the latter. */
#pragma once
#include "elements.h"

#if defined(INT8_ROWS)
#define SCALED 1
typedef int8_t stored;
typedef int8_t numbers __attribute__((vector_size(LANES), aligned(1), may_alias));

FORCED floats widen_stored(const stored *from) { /* whole numbers, which the scale is still to be multiplied with */
#if LANES == 16
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i_u *)from)));
#elif LANES == 8 && defined(__AVX2__)
    return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(from)));
#else
    return __builtin_convertvector(__builtin_convertvector(*(const numbers *)from, ints), floats);
#endif
}

FORCED float scale_of(const stored *row, long dim) {
    float scale;
    memcpy(&scale, row + dim, sizeof scale);
    return scale;
}

/* Returns the scales of `count` rows that lie `apart` from each other, and 0 in the lanes behind them. */
static __attribute__((noinline)) floats scales_of(const stored *rows, long apart, long dim, long count) {
    float scales[LANES] = {0};
    for (long t = 0; t < count; t++) scales[t] = scale_of(rows + t * apart, dim);
    return *(const floats *)scales;
}

#else
#define SCALED 0
typedef element stored;

FORCED floats widen_stored(const stored *from) { return widen_lanes(from); }

FORCED float scale_of(const stored *row, long dim) {
    (void)row, (void)dim;
    return 1;
}

FORCED floats scales_of(const stored *rows, long apart, long dim, long count) {
    (void)rows, (void)apart, (void)dim, (void)count;
    return (floats){0} + 1.0f;
}
#endif
