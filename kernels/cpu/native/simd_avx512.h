/* 16 float32 lanes in one AVX-512 register. The including file defines FN: `static inline`, always inlined, with its target. */
#include <immintrin.h>

typedef __m512 v16;

FN v16 v_set1(float x) { return _mm512_set1_ps(x); }
FN v16 v_load(const float *p) { return _mm512_loadu_ps(p); }
FN void v_store(float *p, v16 x) { _mm512_storeu_ps(p, x); }
FN v16 v_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
FN v16 v_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
FN v16 v_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
FN v16 v_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
FN v16 v_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
FN v16 v_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
FN v16 v_round(v16 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
FN float v_hmax(v16 a) { return _mm512_reduce_max_ps(a); }

/* Sum of the lanes, in the same order on every instruction set: i and i + 8, then i + 4, i + 2, i + 1. */
FN float v_sum(v16 a) {
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}

/* a * 2^n for integers n in [-126, 127]; the product must not be denormal. */
FN v16 v_scale2(v16 a, v16 n) { return _mm512_scalef_ps(a, n); }

/* x < bound ? yes : no; `no` if x is NaN. */
FN v16 v_where_less(v16 x, v16 bound, v16 yes, v16 no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, bound, _CMP_LT_OQ), no, yes);
}

/* Lanes begin <= i < end of x, `fill` in the others. */
FN v16 v_keep(v16 x, int begin, int end, v16 fill) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __mmask16 kept = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(begin)) &
                     _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(end));
    return _mm512_mask_blend_ps(kept, fill, x);
}

/* The first and the second bfloat16 of each lane's pair, widened. */
FN v16 v_bfloat_low(v16 x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 16)); }
FN v16 v_bfloat_high(v16 x) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int)0xffff0000)));
}

typedef __m512i v_bytes; /* 64 */

FN v_bytes v_load_bytes(const uint8_t *p) { return _mm512_loadu_si512(p); }
/* Repeat 16 bytes four times. */
FN v_bytes v_repeat_bytes(const uint8_t *p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p)); }
FN v_bytes v_lower_halves(v_bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
FN v_bytes v_upper_halves(v_bytes x) { return v_lower_halves(_mm512_srli_epi16(x, 4)); }
/* table[i] for each index i < 16; `table` has the same 16 bytes four times. */
FN v_bytes v_look_up(v_bytes table, v_bytes i) { return _mm512_shuffle_epi8(table, i); }
FN v_bytes v_sub_bytes(v_bytes a, v_bytes b) { return _mm512_sub_epi8(a, b); }
FN v_bytes v_abs_bytes(v_bytes x) { return _mm512_abs_epi8(x); }
/* x with the highest bits of `sign`, where x has none. */
FN v_bytes v_with_sign(v_bytes x, v_bytes sign) { return _mm512_ternarylogic_epi32(x, sign, _mm512_set1_epi8((char)0x80), 0xf8); }
/* From each 16 bytes, interleave the first 8, or the last 8, as low and high bytes of 8 numbers. */
FN v16 v_interleave_first(v_bytes low, v_bytes high) { return _mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high)); }
FN v16 v_interleave_last(v_bytes low, v_bytes high) { return _mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high)); }

/* Indices for a shuffle that moves byte `i` of each lane to the lane's top and clears the others. */
FN __m128i to_top(int i) {
    return _mm_add_epi32(_mm_setr_epi32(0x00808080, 0x04808080, 0x08808080, 0x0c808080), _mm_set1_epi32(i << 24));
}

/* Signed bytes `first` and `first` + 1 of each lane, times 2^24 `scale`, rounded to a pair of bfloat16, ties away from zero. */
FN v16 v_byte_pair(v16 x, int first, v16 scale) {
    const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32((int)0xffff0000);
    const __m512i bits = _mm512_castps_si512(x);
    __m512i low = _mm512_shuffle_epi8(bits, _mm512_broadcast_i32x4(to_top(first)));
    __m512i high = _mm512_shuffle_epi8(bits, _mm512_broadcast_i32x4(to_top(first + 1)));
    low = _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(low), scale));
    high = _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(high), scale));
    low = _mm512_srli_epi32(_mm512_add_epi32(low, half), 16);
    /* low | (high & upper) */
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(low, _mm512_add_epi32(high, half), upper, 0xf8));
}

FN __mmask16 v_first(int count) { return (__mmask16)((1u << count) - 1); }

/* Load `count` <= 16 elements, widened; zeros after them. */
FN v16 v_load_elements(const void *p, int dtype, int count) {
    __mmask16 m = v_first(count);
    if (dtype == FLOAT32) return _mm512_maskz_loadu_ps(m, p);
    __m256i half = _mm256_maskz_loadu_epi16(m, p);
    if (dtype == FLOAT16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* Store `count` <= 16 elements, rounded to the nearest, ties to even. */
FN void v_store_elements(void *p, int dtype, int count, v16 x) {
    __mmask16 m = v_first(count);
    if (dtype == FLOAT32) {
        _mm512_mask_storeu_ps(p, m, x);
    } else if (dtype == FLOAT16) {
        _mm256_mask_storeu_epi16(p, m, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    } else {
        __m512i bits = _mm512_castps_si512(x);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        rounded = _mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7fc00000));
        _mm256_mask_storeu_epi16(p, m, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
    }
}

/* Transpose: lane j of r[i] becomes lane i of r[j]. */
FN void v_transpose(v16 r[16]) {
    v16 t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
        for (int j = 0; j < 2; j++) {
            __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
            r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    }
    /* r[4 a + c]: 128-bit part p holds column 4 p + c of rows 4 a .. 4 a + 3. */
#pragma GCC unroll 16
    for (int c = 0; c < 4; c++) {
        t[c] = _mm512_shuffle_f32x4(r[c], r[c + 4], 0x88);
        t[c + 4] = _mm512_shuffle_f32x4(r[c], r[c + 4], 0xdd);
        t[c + 8] = _mm512_shuffle_f32x4(r[c + 8], r[c + 12], 0x88);
        t[c + 12] = _mm512_shuffle_f32x4(r[c + 8], r[c + 12], 0xdd);
    }
#pragma GCC unroll 16
    for (int c = 0; c < 4; c++) {
        r[c] = _mm512_shuffle_f32x4(t[c], t[c + 8], 0x88);
        r[c + 8] = _mm512_shuffle_f32x4(t[c], t[c + 8], 0xdd);
        r[c + 4] = _mm512_shuffle_f32x4(t[c + 4], t[c + 12], 0x88);
        r[c + 12] = _mm512_shuffle_f32x4(t[c + 4], t[c + 12], 0xdd);
    }
}

#define X86_FLUSH_DENORMALS 1
