/* Short convolutions and state scans, one row's tokens after the other. Included once for each instruction set.
 *
 * Arithmetic is float32, and each column's sums have one order. So a token's bits depend neither on the step's other rows, nor on how a row's
 * tokens are divided into steps, nor on the threads.
 *
 * The including file includes its simd_*.h before and defines FN, TARGETED (function attributes) and NAME(function).
 */
#include <string.h>

#include "attention_math.h"
#include "row_part.h"

/* x / (1 + e^-x); e^-x is bounded by 2^126, where the quotient is practically 0. */
FN v16 conv_silu(v16 x) {
    v16 power = v_mul(x, v_set1(-LOG2_E));
    power = v_where_less(v_set1(126.0f), power, v_set1(126.0f), power);
    return v_div(x, v_add(v_set1(1.0f), v_exp2(power)));
}

/* ---- Short convolution: the last inputs are a ring of `taps` vectors for each of a block's channels. ---- */

/* Store the inputs of a block as a state, oldest first. `newest` is the ring's place of the newest. */
FN void keep_inputs(const struct conv_call *c, float ring[][CONV_BLOCK], int64_t newest, int64_t slot, int64_t first, int64_t count) {
    int bytes = c->dtype == FLOAT32 ? 4 : 2;
    for (int64_t j = 0; j < c->taps; j++) {
        const float *inputs = ring[(newest + 1 + j) % c->taps];
        char *state = c->states + slot * c->slot_stride + (j * c->channels + first) * bytes;
        for (int64_t i = 0; i < count; i += LANES) store_part(state, i, count, (int)c->dtype, v_load(inputs + i));
    }
}

FN void conv_unit(const struct conv_call *c, int64_t row, int64_t first) {
    float ring[MAX_TAPS][CONV_BLOCK];
    const struct recurrent_rows *rows = &c->rows;
    int64_t count = c->channels - first < CONV_BLOCK ? c->channels - first : CONV_BLOCK;
    int bytes = c->dtype == FLOAT32 ? 4 : 2;
    int64_t taps = c->taps, newest = taps - 1, begin = rows->cu_q[row], end = rows->cu_q[row + 1], save = rows->first_save[row];
    if (begin == end) return;
    for (int64_t j = 0; j < taps; j++) {
        const char *state = c->states + rows->slots[row] * c->slot_stride + (j * c->channels + first) * bytes;
        for (int64_t i = 0; i < count; i += LANES)
            v_store(ring[j] + i, rows->fresh[row] ? v_set1(0.0f) : load_part(state, i, count, (int)c->dtype));
    }
    for (int64_t t = begin; t < end; t++) {
        newest = (newest + 1) % taps;
        const char *x = (const char *)(c->x + t * c->x_stride + first);
        for (int64_t i = 0; i < count; i += LANES) {
            v_store(ring[newest] + i, load_part(x, i, count, FLOAT32));
            v16 sum = c->bias ? load_part((const char *)(c->bias + first), i, count, FLOAT32) : v_set1(0.0f);
            for (int64_t j = 0; j < taps; j++) {
                v16 weight = load_part((const char *)(c->weight + j * c->channels + first), i, count, FLOAT32);
                sum = v_fma(weight, v_load(ring[(newest + 1 + j) % taps] + i), sum);
            }
            store_part((char *)(c->out + t * c->channels + first), i, count, FLOAT32, c->silu ? conv_silu(sum) : sum);
        }
        while (save < rows->first_save[row + 1] && rows->saves[3 * save + 1] == t + 1 - begin)
            keep_inputs(c, ring, newest, rows->saves[3 * save++ + 2], first, count);
    }
    keep_inputs(c, ring, newest, rows->slots[row], first, count);
}

TARGETED int64_t NAME(conv)(void *argument) {
    struct conv_call *c = argument;
    struct member member = team_join(c->team);
    int64_t blocks = (c->channels + CONV_BLOCK - 1) / CONV_BLOCK, done = 0;
    for (int64_t unit; (unit = team_take(c->team, &member)) >= 0; done++) conv_unit(c, unit / blocks, unit % blocks * CONV_BLOCK);
    return done;
}

/* ---- State scan: a unit has `columns` columns of one head's state. ---- */

/* One token: `state` has rows of `stride` floats. `n` vectors cover the columns; n is a constant where this is inlined. */
FN void scan_token(const struct scan_call *c, float *state, int64_t stride, const float *q, const float *k, const float *v, float decay,
                   const float *beta, float *out, int n, int64_t columns) {
    v16 u[4], sum[4];
    v16 a = v_set1(decay);
    int64_t keys = c->key_dim;
    for (int j = 0; j < n; j++) u[j] = load_part((const char *)v, j * LANES, columns, FLOAT32);
    if (beta) {
        for (int j = 0; j < n; j++) sum[j] = v_set1(0.0f);
        for (int64_t i = 0; i < keys; i++)
            for (int j = 0; j < n; j++) sum[j] = v_fma(v_set1(k[i]), v_load(state + i * stride + j * LANES), sum[j]);
        for (int j = 0; j < n; j++) u[j] = v_mul(v_set1(*beta), v_sub(u[j], v_mul(a, sum[j])));
    }
    for (int j = 0; j < n; j++) sum[j] = v_set1(0.0f);
    for (int64_t i = 0; i < keys; i++) {
        v16 key = v_set1(k[i]), query = v_set1(q[i]);
        for (int j = 0; j < n; j++) {
            v16 part = v_fma(key, u[j], v_mul(a, v_load(state + i * stride + j * LANES)));
            v_store(state + i * stride + j * LANES, part);
            sum[j] = v_fma(query, part, sum[j]);
        }
    }
    for (int j = 0; j < n; j++) store_part((char *)out, j * LANES, columns, FLOAT32, sum[j]);
}

/* Copy the columns of a state between a slot and a row's own memory, whose rows have SCAN_BLOCK floats. */
FN void copy_state(const struct scan_call *c, float *slot, float *own, int64_t columns, int to_slot) {
    for (int64_t i = 0; i < c->key_dim; i++) {
        if (to_slot) memcpy(slot + i * c->value_dim, own + i * SCAN_BLOCK, columns * sizeof *own);
        else memcpy(own + i * SCAN_BLOCK, slot + i * c->value_dim, columns * sizeof *own);
    }
}

FN float *slot_of(const struct scan_call *c, int64_t slot, int64_t head, int64_t first) {
    return (float *)(c->states + slot * c->slot_stride) + head * c->key_dim * c->value_dim + first;
}

FN void scan_unit(const struct scan_call *c, int64_t row, int64_t head, int64_t first, int n) {
    float own[MAX_KEY_DIM * SCAN_BLOCK];
    const struct recurrent_rows *rows = &c->rows;
    int64_t columns = c->value_dim - first < SCAN_BLOCK ? c->value_dim - first : SCAN_BLOCK;
    int64_t key_head = head / (c->heads / c->key_heads), begin = rows->cu_q[row], end = rows->cu_q[row + 1], save = rows->first_save[row];
    float *slot = slot_of(c, rows->slots[row], head, first);
    if (begin == end) return;
    /* One token changes the state where it is, unless vectors would exceed its columns. */
    int is_direct = end - begin == 1 && columns % LANES == 0 && !rows->fresh[row];
    if (rows->fresh[row]) memset(own, 0, c->key_dim * SCAN_BLOCK * sizeof *own);
    else if (!is_direct) copy_state(c, slot, own, columns, 0);
    for (int64_t t = begin; t < end; t++) {
        const float *q = c->q + t * c->q_stride + key_head * c->key_dim, *k = c->k + t * c->k_stride + key_head * c->key_dim;
        const float *v = c->v + t * c->v_stride + head * c->value_dim + first, *beta = c->beta ? c->beta + t * c->heads + head : NULL;
        float *out = c->out + (t * c->heads + head) * c->value_dim + first;
        scan_token(c, is_direct ? slot : own, is_direct ? c->value_dim : SCAN_BLOCK, q, k, v, c->decay[t * c->heads + head], beta, out, n, columns);
        while (save < rows->first_save[row + 1] && rows->saves[3 * save + 1] == t + 1 - begin) {
            if (is_direct) copy_state(c, slot, own, columns, 0);
            copy_state(c, slot_of(c, rows->saves[3 * save++ + 2], head, first), own, columns, 1);
        }
    }
    if (!is_direct) copy_state(c, slot, own, columns, 1);
}

TARGETED int64_t NAME(scan)(void *argument) {
    struct scan_call *c = argument;
    struct member member = team_join(c->team);
    int64_t blocks = (c->value_dim + SCAN_BLOCK - 1) / SCAN_BLOCK, done = 0;
    for (int64_t unit; (unit = team_take(c->team, &member)) >= 0; done++) {
        int64_t row = unit / (c->heads * blocks), head = unit / blocks % c->heads, first = unit % blocks * SCAN_BLOCK;
        int64_t columns = c->value_dim - first;
        if (columns > 48) scan_unit(c, row, head, first, 4);
        else if (columns > 32) scan_unit(c, row, head, first, 3);
        else if (columns > 16) scan_unit(c, row, head, first, 2);
        else scan_unit(c, row, head, first, 1);
    }
    return done;
}
