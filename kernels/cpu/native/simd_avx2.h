/* 16 float32 lanes in two AVX2 registers: the same lanes, and hence the same sums, as in one AVX-512 register. */
#include <immintrin.h>
#include <string.h>

typedef struct {
    __m256 a, b;
} v16;

FN v16 v_pair(__m256 a, __m256 b) {
    v16 x = {a, b};
    return x;
}

FN v16 v_set1(float x) { return v_pair(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
FN v16 v_load(const float *p) { return v_pair(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
FN void v_store(float *p, v16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
FN v16 v_add(v16 x, v16 y) { return v_pair(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)); }
FN v16 v_sub(v16 x, v16 y) { return v_pair(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)); }
FN v16 v_mul(v16 x, v16 y) { return v_pair(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)); }
FN v16 v_div(v16 x, v16 y) { return v_pair(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)); }
FN v16 v_max(v16 x, v16 y) { return v_pair(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)); }
FN v16 v_fma(v16 x, v16 y, v16 z) {
    return v_pair(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b));
}
FN v16 v_round(v16 x) {
    const int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return v_pair(_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode));
}
FN float v_hmax(v16 x) {
    __m256 m = _mm256_max_ps(x.a, x.b);
    __m128 n = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    n = _mm_max_ps(n, _mm_movehl_ps(n, n));
    return _mm_cvtss_f32(_mm_max_ss(n, _mm_movehdup_ps(n)));
}

/* Sum of the lanes, in the same order on every instruction set: i and i + 8, then i + 4, i + 2, i + 1. */
FN float v_sum(v16 x) {
    __m256 half = _mm256_add_ps(x.a, x.b);
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}

FN __m256 v_pow2_half(__m256 n) {
    __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}

/* a * 2^n for integers n in [-126, 127]; the product must not be denormal. */
FN v16 v_scale2(v16 a, v16 n) { return v_mul(a, v_pair(v_pow2_half(n.a), v_pow2_half(n.b))); }

/* x < bound ? yes : no; `no` if x is NaN. */
FN v16 v_where_less(v16 x, v16 bound, v16 yes, v16 no) {
    return v_pair(_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, bound.a, _CMP_LT_OQ)),
                  _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, bound.b, _CMP_LT_OQ)));
}

FN __m256 v_keep_half(__m256 x, __m256i lane, int begin, int end, __m256 fill) {
    __m256i low = _mm256_cmpgt_epi32(_mm256_set1_epi32(begin), lane);
    __m256i high = _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(end - 1));
    return _mm256_blendv_ps(x, fill, _mm256_castsi256_ps(_mm256_or_si256(low, high)));
}

/* Lanes begin <= i < end of x, `fill` in the others. */
FN v16 v_keep(v16 x, int begin, int end, v16 fill) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i next = _mm256_add_epi32(lane, _mm256_set1_epi32(8));
    return v_pair(v_keep_half(x.a, lane, begin, end, fill.a), v_keep_half(x.b, next, begin, end, fill.b));
}

/* The first and the second bfloat16 of each lane's pair, widened. */
FN v16 v_bfloat_low(v16 x) {
    return v_pair(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x.a), 16)),
                  _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x.b), 16)));
}
FN v16 v_bfloat_high(v16 x) {
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32((int)0xffff0000));
    return v_pair(_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask));
}

typedef struct {
    __m256i a, b;
} v_bytes; /* 64 */

FN v_bytes v_bytes_of(__m256i a, __m256i b) {
    v_bytes x = {a, b};
    return x;
}
FN v_bytes v_load_bytes(const uint8_t *p) {
    return v_bytes_of(_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32)));
}
/* Repeat 16 bytes four times. */
FN v_bytes v_repeat_bytes(const uint8_t *p) {
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
    return v_bytes_of(twice, twice);
}
FN v_bytes v_lower_halves(v_bytes x) {
    const __m256i mask = _mm256_set1_epi8(15);
    return v_bytes_of(_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask));
}
FN v_bytes v_upper_halves(v_bytes x) { return v_lower_halves(v_bytes_of(_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4))); }
/* table[i] for each index i < 16; `table` has the same 16 bytes four times. */
FN v_bytes v_look_up(v_bytes table, v_bytes i) { return v_bytes_of(_mm256_shuffle_epi8(table.a, i.a), _mm256_shuffle_epi8(table.b, i.b)); }
FN v_bytes v_sub_bytes(v_bytes x, v_bytes y) { return v_bytes_of(_mm256_sub_epi8(x.a, y.a), _mm256_sub_epi8(x.b, y.b)); }
FN v_bytes v_abs_bytes(v_bytes x) { return v_bytes_of(_mm256_abs_epi8(x.a), _mm256_abs_epi8(x.b)); }
/* x with the highest bits of `sign`, where x has none. */
FN v_bytes v_with_sign(v_bytes x, v_bytes sign) {
    const __m256i bit = _mm256_set1_epi8((char)0x80);
    return v_bytes_of(_mm256_or_si256(x.a, _mm256_and_si256(sign.a, bit)), _mm256_or_si256(x.b, _mm256_and_si256(sign.b, bit)));
}
/* From each 16 bytes, interleave the first 8, or the last 8, as low and high bytes of 8 numbers. */
FN v16 v_interleave_first(v_bytes low, v_bytes high) {
    return v_pair(_mm256_castsi256_ps(_mm256_unpacklo_epi8(low.a, high.a)), _mm256_castsi256_ps(_mm256_unpacklo_epi8(low.b, high.b)));
}
FN v16 v_interleave_last(v_bytes low, v_bytes high) {
    return v_pair(_mm256_castsi256_ps(_mm256_unpackhi_epi8(low.a, high.a)), _mm256_castsi256_ps(_mm256_unpackhi_epi8(low.b, high.b)));
}

/* Indices for a shuffle that moves byte `i` of each lane to the lane's top and clears the others. */
FN __m128i to_top(int i) {
    return _mm_add_epi32(_mm_setr_epi32(0x00808080, 0x04808080, 0x08808080, 0x0c808080), _mm_set1_epi32(i << 24));
}

FN __m256 v_byte_pair_half(__m256 x, int first, __m256 scale) {
    const __m256i half = _mm256_set1_epi32(0x8000), upper = _mm256_set1_epi32((int)0xffff0000);
    const __m256i bits = _mm256_castps_si256(x);
    __m256i low = _mm256_shuffle_epi8(bits, _mm256_broadcastsi128_si256(to_top(first)));
    __m256i high = _mm256_shuffle_epi8(bits, _mm256_broadcastsi128_si256(to_top(first + 1)));
    low = _mm256_castps_si256(_mm256_mul_ps(_mm256_cvtepi32_ps(low), scale));
    high = _mm256_castps_si256(_mm256_mul_ps(_mm256_cvtepi32_ps(high), scale));
    low = _mm256_srli_epi32(_mm256_add_epi32(low, half), 16);
    return _mm256_castsi256_ps(_mm256_or_si256(low, _mm256_and_si256(_mm256_add_epi32(high, half), upper)));
}

/* Signed bytes `first` and `first` + 1 of each lane, times 2^24 `scale`, rounded to a pair of bfloat16, ties away from zero. */
FN v16 v_byte_pair(v16 x, int first, v16 scale) {
    return v_pair(v_byte_pair_half(x.a, first, scale.a), v_byte_pair_half(x.b, first, scale.b));
}

FN __m256 v_widen(const void *p, int dtype) {
    if (dtype == FLOAT32) return _mm256_loadu_ps(p);
    __m128i half = _mm_loadu_si128(p);
    if (dtype == FLOAT16) return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

FN void v_narrow(void *p, int dtype, __m256 x) {
    if (dtype == FLOAT32) {
        _mm256_storeu_ps(p, x);
    } else if (dtype == FLOAT16) {
        _mm_storeu_si128(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    } else {
        __m256i bits = _mm256_castps_si256(x);
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
        rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(nan));
        rounded = _mm256_srli_epi32(rounded, 16);
        _mm_storeu_si128(p, _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)));
    }
}

/* Load 8 or 16 elements, widened; zeros after them. */
FN v16 v_load_elements(const void *p, int dtype, int count) {
    const char *next = (const char *)p + 8 * (dtype == FLOAT32 ? 4 : 2);
    return v_pair(v_widen(p, dtype), count > 8 ? v_widen(next, dtype) : _mm256_setzero_ps());
}

/* Store 8 or 16 elements, rounded to the nearest, ties to even. */
FN void v_store_elements(void *p, int dtype, int count, v16 x) {
    v_narrow(p, dtype, x.a);
    if (count > 8) v_narrow((char *)p + 8 * (dtype == FLOAT32 ? 4 : 2), dtype, x.b);
}

FN void v_transpose8(__m256 r[8]) {
    __m256 t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
            r[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
        }
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
    memcpy(r, t, sizeof t);
}

/* Transpose: lane j of r[i] becomes lane i of r[j]. */
FN void v_transpose(v16 r[16]) {
    __m256 low[8], high[8];
    v16 result[16];
    for (int half = 0; half < 2; half++) {
        for (int i = 0; i < 8; i++) low[i] = half ? r[i].b : r[i].a;
        for (int i = 0; i < 8; i++) high[i] = half ? r[i + 8].b : r[i + 8].a;
        v_transpose8(low);
        v_transpose8(high);
        for (int i = 0; i < 8; i++) result[8 * half + i] = v_pair(low[i], high[i]);
    }
    memcpy(r, result, sizeof result);
}

#define X86_FLUSH_DENORMALS 1
