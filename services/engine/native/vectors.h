/* Defines vectors of as many floats as a register of the instruction set holds, in the vector types that GCC and Clang
 * share, and what the kernels compute with them. */
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t shorts __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (words){__VA_ARGS__})
#endif

#define FORCED static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")

/* Where `mask` (all bits of a lane, or none) is set a, else b. */
FORCED floats chosen(ints mask, floats a, floats b) { return (floats)((mask & (ints)a) | (~mask & (ints)b)); }

FORCED floats larger(floats a, floats b) {
#if LANES == 16
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return chosen(a > b, a, b);
#endif
}

FORCED floats smaller(floats a, floats b) {
#if LANES == 16
    return (floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return chosen(a < b, a, b);
#endif
}

/* Numbers of 16 bits, as many as there are lanes. */

FORCED floats widen_bfloats(const uint16_t *from) {
    return (floats)(__builtin_convertvector(*(const shorts *)from, words) << 16);
}

FORCED shorts narrow_bfloats(floats numbers) { /* to nearest, ties to even; NaN stays NaN */
    words bits = (words)numbers;
    words odd_ones = bits >> 16 & 1;
    words nan = (words)((bits & 0x7fffffff) > 0x7f800000);
    bits = (bits + 0x7fff + odd_ones) >> 16;
    return __builtin_convertvector((bits & ~nan) | (nan & 0x7fc0), shorts);
}

FORCED floats widen_halves(const uint16_t *from) {
#if LANES == 16
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i_u *)from));
#elif LANES == 8 && defined(__F16C__)
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i_u *)from));
#else
    /* Exponents are moved by a product, which is exact and right for subnormal numbers too. */
    words wide = __builtin_convertvector(*(const shorts *)from, words);
    words rest = wide & 0x7fff;
    words special = (words)(rest >= 0x7c00) & 0x7f800000; /* infinity, NaN */
    floats size = (floats)(rest << 13) * 0x1p112f;
    return (floats)((words)size | special | (wide & 0x8000) << 16);
#endif
}

#define LARGEST_EXPONENT 87.0f

/* Returns e to the power of each lane, which is clamped to -87 ... 87. Its relative error is about 3e-7. */
FORCED floats exponentials(floats x) {
    x = smaller(larger(x, (floats){0} - LARGEST_EXPONENT), (floats){0} + LARGEST_EXPONENT);
    /* The offset makes it positive, so that cutting off rounds to the nearest. */
    ints whole = __builtin_convertvector(x * 1.44269504f + 128.5f, ints) - 128;
    floats rest = x - __builtin_convertvector(whole, floats) * 0.693147182f;
    floats sum = 1.0f + rest * (1.0f + rest * (0.5f + rest * (0.166666667f + rest * (0.0416666667f +
                 rest * (0.00833333333f + rest * 0.00138888889f)))));
    return sum * (floats)((whole + 127) << 23);
}

FORCED float largest_lane(floats x) {
    float result = x[0];
    for (int i = 1; i < LANES; i++) result = x[i] > result ? x[i] : result;
    return result;
}

FORCED float sum_of_lanes(floats x) {
    float result = 0;
    for (int i = 0; i < LANES; i++) result += x[i];
    return result;
}

/* Halves, quarters ... of two vectors are added, so that a result has one's sums in half of its lanes and the other's
 * in the other half. */
#if LANES == 16
#define BY_8(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) + \
                   SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
#define BY_4(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) + \
                   SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
#define BY_2(a, b) SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) + \
                   SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define BY_1(a, b) SHUFFLE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) + \
                   SHUFFLE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)
#elif LANES == 8
#define BY_4(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15)
#define BY_2(a, b) SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define BY_1(a, b) SHUFFLE(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE(a, b, 1, 9, 3, 11, 5, 13, 7, 15)
#else
#define BY_2(a, b) SHUFFLE(a, b, 0, 1, 4, 5) + SHUFFLE(a, b, 2, 3, 6, 7)
#define BY_1(a, b) SHUFFLE(a, b, 0, 4, 2, 6) + SHUFFLE(a, b, 1, 5, 3, 7)
#endif

/* Returns the sum of the lanes of parts[t] in lane t. */
FORCED floats sums_of_each(const floats *parts) {
#if LANES == 16
    floats by8[8], by4[4];
    for (int i = 0; i < 8; i++) by8[i] = BY_8(parts[i], parts[i + 8]);
    for (int i = 0; i < 4; i++) by4[i] = BY_4(by8[i], by8[i + 4]);
#elif LANES == 8
    floats by4[4];
    for (int i = 0; i < 4; i++) by4[i] = BY_4(parts[i], parts[i + 4]);
#else
    const floats *by4 = parts;
#endif
    floats first = BY_2(by4[0], by4[2]), second = BY_2(by4[1], by4[3]);
    return BY_1(first, second);
}
