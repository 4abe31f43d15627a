/* RMS norm, gated activation, rotation and KV write, one row after the other. Included once for each instruction set.
 *
 * All arithmetic is float32 with one rounding at the end. A row's result depends on that row alone: each of 16 lanes adds up its columns in
 * order, and then the lanes are added in a fixed order.
 *
 * The including file includes its simd_*.h before and defines FN, TARGETED (function attributes) and NAME(function).
 */
#include <math.h>
#include <string.h>

#include "attention_math.h"
#include "row_part.h"

FN float inverse_rms(v16 squares, int64_t columns, float eps) { return 1.0f / sqrtf(v_sum(squares) / (float)columns + eps); }

FN void norm_rows(const struct norm_call *c, int64_t begin, int64_t end, int dtype) {
    for (int64_t row = begin; row < end; row++) {
        const char *x = c->x + row * c->x_stride;
        char *out = c->out + row * c->out_stride;
        v16 squares = v_set1(0.0f);
        for (int64_t i = 0; i < c->columns; i += LANES) {
            v16 part = load_part(x, i, c->columns, dtype);
            squares = v_fma(part, part, squares);
        }
        v16 factor = v_set1(inverse_rms(squares, c->columns, c->eps));
        for (int64_t i = 0; i < c->columns; i += LANES) {
            v16 part = v_mul(load_part(x, i, c->columns, dtype), factor);
            store_part(out, i, c->columns, dtype, v_mul(part, v_load(c->weight + i)));
        }
    }
}

/* x / (1 + e^-x); e^-x is bounded by 2^126, where the quotient is practically 0. */
FN v16 silu(v16 x) {
    v16 power = v_mul(x, v_set1(-LOG2_E));
    power = v_where_less(v_set1(126.0f), power, v_set1(126.0f), power);
    return v_div(x, v_add(v_set1(1.0f), v_exp2(power)));
}

/* x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) */
FN v16 gelu(v16 x) {
    v16 cubic = v_fma(v_mul(v_mul(x, x), v_set1(0.044715f)), x, x);
    v16 t = v_tanh(v_mul(cubic, v_set1(0.7978845608028654f)));
    return v_mul(v_mul(x, v_set1(0.5f)), v_add(v_set1(1.0f), t));
}

FN void gated_rows(const struct gated_call *c, int64_t begin, int64_t end, int dtype) {
    int64_t row_bytes = c->columns * (dtype == FLOAT32 ? 4 : 2);
    for (int64_t row = begin; row < end; row++) {
        const char *gate = c->x + row * c->x_stride, *up = gate + row_bytes;
        for (int64_t i = 0; i < c->columns; i += LANES) {
            v16 x = load_part(gate, i, c->columns, dtype);
            x = c->gelu ? gelu(x) : silu(x);
            store_part(c->out + row * c->out_stride, i, c->columns, dtype, v_mul(x, load_part(up, i, c->columns, dtype)));
        }
    }
}

struct token_tables {
    float cos[MAX_HEAD_DIM], sin[MAX_HEAD_DIM];
};

/* Rotate the halves of the first `rotary` elements: (a, b) becomes (a cos - b sin, b cos + a sin). Other elements are copied. */
FN void rotate(float *y, const float *x, const struct token_tables *t, int64_t rotary, int64_t head_dim) {
    int64_t half = rotary / 2, i = 0;
    for (; i + LANES <= half; i += LANES) {
        v16 a = v_load(x + i), b = v_load(x + i + half);
        v_store(y + i, v_sub(v_mul(a, v_load(t->cos + i)), v_mul(b, v_load(t->sin + i))));
        v_store(y + i + half, v_add(v_mul(b, v_load(t->cos + i + half)), v_mul(a, v_load(t->sin + i + half))));
    }
    for (; i < half; i++) {
        y[i] = x[i] * t->cos[i] - x[i + half] * t->sin[i];
        y[i + half] = x[i + half] * t->cos[i + half] + x[i] * t->sin[i + half];
    }
    for (i = rotary; i < head_dim; i++) y[i] = x[i];
}

FN float head_factor(const struct rotate_call *c, const char *head, int dtype) {
    v16 squares = v_set1(0.0f);
    for (int64_t i = 0; i < c->head_dim; i += LANES) {
        v16 part = load_part(head, i, c->head_dim, dtype);
        squares = v_fma(part, part, squares);
    }
    return inverse_rms(squares, c->head_dim, c->eps);
}

FN void rotate_head(const struct rotate_call *c, const char *from, char *to, const float *norm, float factor, const struct token_tables *t, int dtype) {
    float x[MAX_HEAD_DIM], y[MAX_HEAD_DIM];
    for (int64_t i = 0; i < c->head_dim; i += LANES) {
        v16 part = load_part(from, i, c->head_dim, dtype);
        if (norm) part = v_mul(v_mul(part, v_set1(factor)), load_part((const char *)norm, i, c->head_dim, FLOAT32));
        v_store(x + i, part);
    }
    rotate(y, x, t, c->step.rotary, c->head_dim);
    for (int64_t i = 0; i < c->head_dim; i += LANES) store_part(to, i, c->head_dim, dtype, v_load(y + i));
}

FN void rotate_tokens(struct rotate_call *c, int64_t begin, int64_t end, int dtype) {
    int64_t bytes = dtype == FLOAT32 ? 4 : 2, head_bytes = c->head_dim * bytes, heads = c->heads + c->kv_heads;
    for (int64_t token = begin; token < end; token++) {
        struct token_tables t;
        for (int64_t i = 0; i < c->step.rotary; i += LANES) {
            v_store(t.cos + i, load_part(c->step.cos + token * c->step.rotary * bytes, i, c->step.rotary, dtype));
            v_store(t.sin + i, load_part(c->step.sin + token * c->step.rotary * bytes, i, c->step.rotary, dtype));
        }
        const char *head = c->qkv + token * c->qkv_stride;
        /* The norm factor of a head is a long dependency chain: compute it while the previous head is rotated. */
        float factor = c->q_norm ? head_factor(c, head, dtype) : 1.0f, next = 1.0f;
        for (int64_t h = 0; h < heads; h++, head += head_bytes, factor = next) {
            if (c->q_norm && h + 1 < heads) next = head_factor(c, head + head_bytes, dtype);
            if (h < c->heads) {
                rotate_head(c, head, c->q_out + (token * c->heads + h) * head_bytes, c->q_norm, factor, &t, dtype);
                continue;
            }
            int64_t row = c->step.rows[token * c->kv_heads + h - c->heads];
            if (row < 0 || row >= c->page_rows) {
                __atomic_fetch_add(&c->outside, 1, __ATOMIC_RELAXED);
                continue;
            }
            rotate_head(c, head, c->k_pages + row * head_bytes, c->k_norm, factor, &t, dtype);
            memcpy(c->v_pages + row * head_bytes, head + c->kv_heads * head_bytes, (size_t)head_bytes);
        }
    }
}

#define WORKER_OF(function, call_struct, rows_of, num_rows) \
    TARGETED int64_t NAME(function)(void *argument) { \
        struct call_struct *c = argument; \
        struct member member = team_join(c->team); \
        int64_t done = 0; \
        for (int64_t unit; (unit = team_take(c->team, &member)) >= 0; done++) { \
            int64_t begin = unit * UNIT_ROWS, end = begin + UNIT_ROWS < c->num_rows ? begin + UNIT_ROWS : c->num_rows; \
            if (c->dtype == FLOAT32) rows_of(c, begin, end, FLOAT32); \
            if (c->dtype == FLOAT16) rows_of(c, begin, end, FLOAT16); \
            if (c->dtype == BFLOAT16) rows_of(c, begin, end, BFLOAT16); \
        } \
        return done; \
    }
WORKER_OF(norm, norm_call, norm_rows, rows)
WORKER_OF(gated, gated_call, gated_rows, rows)
WORKER_OF(rotate, rotate_call, rotate_tokens, step.tokens)
