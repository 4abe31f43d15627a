/* 2^x and tanh on 16 lanes, with the same operations in the same order on every instruction set. */

#define LOG2_E 1.44269504088896341f

/* 2^x for x <= 127; 0 below -125, so that no weight is denormal. The error is 0.94 units in the last place (a test measures it); 2^0 is
 * exactly 1, which merging relies on.
 * x = n + r exactly, with an integer n and |r| <= 1/2; 2^r by its minimax polynomial of degree 6 (relative error 2e-9). */
FN v16 v_exp2(v16 x) {
    v16 bounded = v_max(v_set1(-126.0f), x); /* NaN stays NaN: v_max returns its second operand if one is NaN */
    v16 n = v_round(bounded);
    v16 r = v_sub(bounded, n);
    v16 p = v_set1(1.5353362e-4f);
    p = v_fma(p, r, v_set1(1.3398874e-3f));
    p = v_fma(p, r, v_set1(9.618437e-3f));
    p = v_fma(p, r, v_set1(5.5503324e-2f));
    p = v_fma(p, r, v_set1(2.4022648e-1f));
    p = v_fma(p, r, v_set1(6.931472e-1f));
    p = v_fma(p, r, v_set1(1.0f));
    return v_where_less(x, v_set1(-125.0f), v_set1(0.0f), v_scale2(p, n));
}

/* 2^x for results that are rounded to bfloat16, by a polynomial of degree 4 (relative error 2.8e-6). Denormal results become 0 if denormals are
 * flushed, as in attention. */
FN v16 v_short_exp2(v16 x) {
    v16 bounded = v_max(v_set1(-127.0f), x);
    v16 n = v_round(bounded);
    v16 r = v_sub(bounded, n);
    v16 p = v_set1(9.5828531e-3f);
    p = v_fma(p, r, v_set1(5.5906425e-2f));
    p = v_fma(p, r, v_set1(2.4024099e-1f));
    p = v_fma(p, r, v_set1(6.9312419e-1f));
    p = v_fma(p, r, v_set1(1.0f));
    return v_scale2(p, n);
}

/* tanh x = 1 - 2 / (e^2x + 1) on |x|; below 0.25, where this loses digits, the odd Taylor polynomial of degree 9. */
FN v16 v_tanh(v16 x) {
    v16 size = v_max(x, v_sub(v_set1(0.0f), x));
    size = v_where_less(v_set1(20.0f), size, v_set1(20.0f), size);
    v16 power = v_exp2(v_mul(size, v_set1(2.0f * LOG2_E)));
    v16 large = v_sub(v_set1(1.0f), v_div(v_set1(2.0f), v_add(power, v_set1(1.0f))));
    large = v_where_less(x, v_set1(0.0f), v_sub(v_set1(0.0f), large), large);
    v16 y = v_mul(x, x);
    v16 p = v_set1(62.0f / 2835);
    p = v_fma(p, y, v_set1(-17.0f / 315));
    p = v_fma(p, y, v_set1(2.0f / 15));
    p = v_fma(p, y, v_set1(-1.0f / 3));
    v16 small = v_fma(v_mul(p, y), x, x);
    return v_where_less(size, v_set1(0.25f), small, large);
}
