/* Defines the type of a tensor's elements, how it becomes float and back, and the names of functions on it. Each file
 * of kernels is compiled once with FLOAT32, once with BFLOAT16 and once with FLOAT16 defined. All sums are in float. */
#pragma once
#include "vectors.h"

#if defined(FLOAT32)
#define NAME(kernel) baton_float32_##kernel
typedef float element;

FORCED float widen(element value) { return value; }
FORCED element narrow(float value) { return value; }
FORCED floats widen_lanes(const element *from) { return *(const floats *)from; }
FORCED void narrow_lanes(floats values, element *to) { *(floats *)to = values; }
FORCED floats rounded(floats values) { return values; } /* as if they were stored */

#elif defined(BFLOAT16)
#define NAME(kernel) baton_bfloat16_##kernel
typedef uint16_t element;

FORCED float widen(element value) {
    union { uint32_t bits; float number; } wide = {.bits = (uint32_t)value << 16};
    return wide.number;
}

FORCED element narrow(float value) { /* to nearest, ties to even; not for NaN */
    union { float number; uint32_t bits; } wide = {.number = value};
    return (element)((wide.bits + 0x7fff + ((wide.bits >> 16) & 1)) >> 16);
}

FORCED floats widen_lanes(const element *from) { return widen_bfloats(from); }

FORCED words narrowed_bits(floats values) { /* in the upper half of each lane; the lower is rubbish */
    return (words)values + 0x7fff + (((words)values >> 16) & 1);
}

FORCED shorts narrowed(floats values) {
#if defined(__AVX512BF16__)
    return (shorts)_mm512_cvtneps_pbh((__m512)values);
#else
    return __builtin_convertvector(narrowed_bits(values) >> 16, shorts);
#endif
}

FORCED void narrow_lanes(floats values, element *to) { *(shorts *)to = narrowed(values); }

FORCED floats rounded(floats values) { /* as if they were stored */
#if defined(__AVX512BF16__)
    return (floats)(__builtin_convertvector(narrowed(values), words) << 16);
#else
    return (floats)(narrowed_bits(values) & 0xffff0000);
#endif
}

#elif defined(FLOAT16)
#define NAME(kernel) baton_float16_##kernel
typedef uint16_t element;

#if defined(__F16C__)
FORCED float widen(element value) { return _cvtsh_ss(value); }
FORCED element narrow(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
#else
FORCED float widen(element value) {
    uint32_t sign = (uint32_t)(value & 0x8000) << 16, rest = (uint32_t)(value & 0x7fff) << 13;
    union { uint32_t bits; float number; } wide = {.bits = rest}, power = {.bits = (254 - 15) << 23};
    wide.number *= power.number; /* moves the exponent, and makes small numbers normal */
    wide.bits |= sign | (rest >= 0x7c00 << 13 ? 0xffu << 23 : 0); /* infinity, NaN */
    return wide.number;
}

FORCED element narrow(float value) { /* to nearest, ties to even */
    union { float number; uint32_t bits; } wide = {.number = value};
    uint32_t sign = wide.bits & 0x80000000u, rest = wide.bits ^ sign, result;
    if (rest >= (127 + 16) << 23) /* too large, infinity, NaN */
        result = rest > 0xffu << 23 ? 0x7e00 : 0x7c00;
    else if (rest < (127 - 14) << 23) { /* below the normal numbers: an addition shifts and rounds them */
        union { uint32_t bits; float number; } small = {.bits = rest}, half = {.bits = (127 - 1) << 23};
        small.number += half.number;
        result = small.bits - half.bits;
    } else
        result = (rest + 0xfff + ((rest >> 13) & 1) - ((127 - 15) << 23)) >> 13;
    return (element)(result | sign >> 16);
}
#endif

FORCED floats widen_lanes(const element *from) { return widen_halves(from); }

FORCED void narrow_lanes(floats values, element *to) {
#if LANES == 16
    _mm256_storeu_si256((__m256i_u *)to, _mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT));
#elif LANES == 8 && defined(__F16C__)
    _mm_storeu_si128((__m128i_u *)to, _mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < LANES; i++) to[i] = narrow(values[i]);
#endif
}

FORCED floats rounded(floats values) { /* as if they were stored */
#if LANES == 16
    return (floats)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT));
#elif LANES == 8 && defined(__F16C__)
    return (floats)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < LANES; i++) values[i] = widen(narrow(values[i]));
    return values;
#endif
}
#else
#error "define FLOAT32, BFLOAT16 or FLOAT16"
#endif

/* As widen_lanes and narrow_lanes, for the first `count` lanes if there are fewer than LANES. */
FORCED floats widen_some(const element *from, long count) {
    if (count >= LANES) return widen_lanes(from);
    element some[LANES] = {0};
    memcpy(some, from, (size_t)count * sizeof *from);
    return widen_lanes(some);
}

FORCED void narrow_some(floats values, element *to, long count) {
    if (count >= LANES) {
        narrow_lanes(values, to);
        return;
    }
    element some[LANES];
    narrow_lanes(values, some);
    memcpy(to, some, (size_t)count * sizeof *to);
}
