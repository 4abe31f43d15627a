/* 16 float32 lanes in portable C, which compilers vectorise with SSE2 or NEON. On machines with a fused multiply-add (ARM) the lanes have the same
 * bits as with AVX-512; on others products are rounded. */
#include <string.h>

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t v16_mask __attribute__((vector_size(64))); /* all bits of a lane or none */

FN v16 v_set1(float x) { return x - (v16){0}; } /* x - 0 keeps the sign of a zero */
FN v16 v_load(const float *p) {
    v16 r;
    memcpy(&r, p, sizeof r);
    return r;
}
FN void v_store(float *p, v16 x) { memcpy(p, &x, sizeof x); }
FN v16 v_add(v16 a, v16 b) { return a + b; }
FN v16 v_sub(v16 a, v16 b) { return a - b; }
FN v16 v_mul(v16 a, v16 b) { return a * b; }
FN v16 v_div(v16 a, v16 b) { return a / b; }
FN v16 v_select(v16_mask m, v16 yes, v16 no) { return (v16)((m & (v16_mask)yes) | (~m & (v16_mask)no)); }
FN v16 v_max(v16 a, v16 b) { return v_select(a > b, a, b); }
FN v16 v_fma(v16 a, v16 b, v16 c) {
#ifdef __FP_FAST_FMAF
    for (int i = 0; i < 16; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}
/* Round to the nearest integer, ties to even, for |a| < 2^22, which is enough for the exponential. */
FN v16 v_round(v16 a) {
    const v16 magic = v_set1(12582912.0f); /* 1.5 * 2^23: its unit in the last place is 1 */
    return (a + magic) - magic;
}
FN float v_hmax(v16 a) {
    float top = a[0];
    for (int i = 1; i < 16; i++) top = a[i] > top ? a[i] : top;
    return top;
}

/* Sum of the lanes, in the same order on every instruction set: i and i + 8, then i + 4, i + 2, i + 1. */
FN float v_sum(v16 a) {
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) a[i] += a[i + width];
    return a[0];
}

/* a * 2^n for integers n in [-126, 127]; the product must not be denormal. */
FN v16 v_scale2(v16 a, v16 n) {
    /* n + 1.5 * 2^23 has n in its low bits. */
    return a * (v16)(((v16_mask)(n + v_set1(12582912.0f)) + 127) << 23);
}

/* x < bound ? yes : no; `no` if x is NaN. */
FN v16 v_where_less(v16 x, v16 bound, v16 yes, v16 no) { return v_select(x < bound, yes, no); }

/* Lanes begin <= i < end of x, `fill` in the others. */
FN v16 v_keep(v16 x, int begin, int end, v16 fill) {
    const v16_mask lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return v_select((lane >= begin) & (lane < end), x, fill);
}

/* The first and the second bfloat16 of each lane's pair, widened. */
FN v16 v_bfloat_low(v16 x) { return (v16)((v16_mask)x << 16); }
FN v16 v_bfloat_high(v16 x) { return (v16)((v16_mask)x & (int32_t)0xffff0000); }

typedef struct {
    uint8_t at[64];
} v_bytes;

FN v_bytes v_load_bytes(const uint8_t *p) {
    v_bytes x;
    memcpy(&x, p, sizeof x);
    return x;
}
/* Repeat 16 bytes four times. */
FN v_bytes v_repeat_bytes(const uint8_t *p) {
    v_bytes x;
    for (int i = 0; i < 64; i++) x.at[i] = p[i % 16];
    return x;
}
FN v_bytes v_lower_halves(v_bytes x) {
    for (int i = 0; i < 64; i++) x.at[i] &= 15;
    return x;
}
FN v_bytes v_upper_halves(v_bytes x) {
    for (int i = 0; i < 64; i++) x.at[i] >>= 4;
    return x;
}
/* table[i] for each index i < 16; `table` has the same 16 bytes four times. */
FN v_bytes v_look_up(v_bytes table, v_bytes i) {
    for (int j = 0; j < 64; j++) i.at[j] = table.at[i.at[j]];
    return i;
}
FN v_bytes v_sub_bytes(v_bytes a, v_bytes b) {
    for (int i = 0; i < 64; i++) a.at[i] = (uint8_t)(a.at[i] - b.at[i]);
    return a;
}
FN v_bytes v_abs_bytes(v_bytes x) {
    for (int i = 0; i < 64; i++) x.at[i] = x.at[i] & 0x80 ? (uint8_t)-x.at[i] : x.at[i];
    return x;
}
/* x with the highest bits of `sign`, where x has none. */
FN v_bytes v_with_sign(v_bytes x, v_bytes sign) {
    for (int i = 0; i < 64; i++) x.at[i] |= sign.at[i] & 0x80;
    return x;
}
FN v16 v_interleave(v_bytes low, v_bytes high, int begin) {
    v16_mask x;
    for (int lane = 0; lane < 16; lane++) {
        const int i = lane / 4 * 16 + begin + lane % 4 * 2;
        x[lane] = (int32_t)(low.at[i] | (uint32_t)high.at[i] << 8 | (uint32_t)low.at[i + 1] << 16 | (uint32_t)high.at[i + 1] << 24);
    }
    return (v16)x;
}
/* From each 16 bytes, interleave the first 8, or the last 8, as low and high bytes of 8 numbers. */
FN v16 v_interleave_first(v_bytes low, v_bytes high) { return v_interleave(low, high, 0); }
FN v16 v_interleave_last(v_bytes low, v_bytes high) { return v_interleave(low, high, 8); }

/* Signed bytes `first` and `first` + 1 of each lane, times 2^24 `scale`, rounded to a pair of bfloat16, ties away from zero. */
FN v16 v_byte_pair(v16 x, int first, v16 scale) {
    const v16_mask bits = (v16_mask)x, top = (v16_mask){0} + (int32_t)0xff000000;
    v16 low = __builtin_convertvector(bits << (24 - 8 * first) & top, v16) * scale;
    v16 high = __builtin_convertvector(bits << (16 - 8 * first) & top, v16) * scale;
    return (v16)((v16_mask)v_bfloat_high((v16)((v16_mask)high + 0x8000)) | ((v16_mask)low + 0x8000) >> 16 & 0xffff);
}

FN float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

FN uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

FN float widen_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = (uint32_t)(half & 0x7fff) << 13;
    if (rest >= 0x7c00u << 13) return from_bits(sign | rest | 0x70000000u); /* inf, NaN */
    /* A product with 2^112 changes the exponent's bias from 15 to 127, for denormals too. */
    return from_bits(sign | to_bits(from_bits(rest) * 0x1p112f));
}

FN uint16_t narrow_half(float x) {
    uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return sign | 0x7e00;
    if (rest >= 0x477ff000) return sign | 0x7c00; /* from 65520 on: infinity */
    if (rest < 0x38800000) { /* below 2^-14 the spacing is that of 0.5 + ...: 2^-24 */
        return sign | (to_bits(from_bits(rest) + 0.5f) - to_bits(0.5f));
    }
    return sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
}

FN uint16_t narrow_bfloat(float x) {
    uint32_t bits = to_bits(x);
    if (x != x) return 0x7fc0;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* Load `count` <= 16 elements, widened; zeros after them. */
FN v16 v_load_elements(const void *p, int dtype, int count) {
    const uint16_t *half = p;
    v16 r = v_set1(0);
    if (dtype == FLOAT32) {
        memcpy(&r, p, count * sizeof(float));
    } else if (dtype == FLOAT16) {
        for (int i = 0; i < count; i++) r[i] = widen_half(half[i]);
    } else {
        for (int i = 0; i < count; i++) r[i] = from_bits((uint32_t)half[i] << 16);
    }
    return r;
}

/* Store `count` <= 16 elements, rounded to the nearest, ties to even. */
FN void v_store_elements(void *p, int dtype, int count, v16 x) {
    uint16_t *half = p;
    if (dtype == FLOAT32) {
        memcpy(p, &x, count * sizeof(float));
    } else if (dtype == FLOAT16) {
        for (int i = 0; i < count; i++) half[i] = narrow_half(x[i]);
    } else {
        for (int i = 0; i < count; i++) half[i] = narrow_bfloat(x[i]);
    }
}

/* Transpose: lane j of r[i] becomes lane i of r[j]. */
FN void v_transpose(v16 r[16]) {
    v16 t[16];
    for (int j = 0; j < 16; j++)
        for (int i = 0; i < 16; i++) t[j][i] = r[i][j];
    memcpy(r, t, sizeof t);
}
