/* Paged attention: the worker that computes one work unit after the other. Included once for each instruction set.
 *
 * For a query row q (a token and one of its heads) over the keys that it sees:
 *
 *     s_j = scale log2(e) q . k_j      m = max_j s_j      o = sum_j 2^(s_j - m) v_j / sum_j 2^(s_j - m)
 *
 *     keys       0 ........ 128 ....... 256 ....... 384 ....... 512 ........
 *     tiles      |  pack K, V; scores; m, sum, o   |           |  m restarts
 *     splits     |<------- one partial softmax: m, sum, o ---->|<-- the next
 *
 * A tile's keys are transposed once, 16 keys per vector, and serve all query rows of the unit (at most MAX_ROWS: the heads of the KV
 * group times several tokens). A score is a sum over head_dim, in order, in one lane; an element of o is a sum over keys, in order, in
 * one lane. Other rows in the same registers do not change it. Tiles and splits begin at absolute positions, splits are merged in
 * order, and a key that a row does not see adds an exact zero. Hence a row's bits do not depend on the other rows, on the prefill chunk
 * or on the thread. With DOT_BF16 both matrix products multiply pairs of bfloat16: weights are rounded to bfloat16, and their sum is the sum of
 * the rounded weights. Otherwise all elements are widened to float32.
 *
 * Both matrix products are in attention_vectors.h or, with MATRIX_REGISTERS (AMX), in attention_matrix.h.
 *
 * The including file includes its simd_*.h before and defines: FN, TARGETED (function attributes); WORKER, TAKES_HEADS, EXP2 (names of the
 * functions); DOT_BF16; MATRIX_REGISTERS; BLOCK_ROWS, the rows of a block (at most 6 in vector registers); AHEAD_LEVEL, the cache level of
 * prefetches for items with one head (3: the first, 2: the second); and for vector registers MAX_VECTORS, the vectors of 16 columns in a
 * product (1 or 4), and PAGE_VECTORS(rows), the same for values that are read in place.
 */
#include <string.h>

#include "attention_math.h"

/* These functions are not inlined: a few functions, inlined at every call, made up most of the code to compile. */
#define SHARED TARGETED static __attribute__((noinline))

#include "attention_unit.h"

/* Flat query token and head of a row of the unit. */
FN int64_t token_of(const struct unit *u, int row) { return u->call->plan.tokens[u->tile->first_token + row / u->group]; }

FN int64_t head_of(const struct unit *u, int row) { return u->head * u->group + row % u->group; }

/* Replace the values of a run with unseen tokens by a copy with zeros: unseen memory may contain NaN, which a weight of zero would not
 * cancel. Keys need no copy, because scores of unseen keys are overwritten. */
FN void copy_values(struct unit *u, int64_t tile_begin, int r, int64_t begin, int64_t end, float *copy) {
    int64_t first = tile_begin + r * RUN, token_bytes = (int64_t)u->dim * u->element_bytes;
    int64_t low = begin > first ? begin - first : 0, high = end < first + RUN ? end - first : RUN;
    if (high - low == RUN) return;
    memset(copy, 0, RUN * token_bytes);
    memcpy((char *)copy + low * token_bytes, u->v_runs[r] + low * token_bytes, (high - low) * token_bytes);
    u->v_runs[r] = (const char *)copy;
}

/* Call copy_values for the tile's first and last run, if they are in runs_begin <= r < runs_end. */
FN void copy_edges(struct unit *u, int64_t tile_begin, int64_t begin, int64_t end, int runs_begin, int runs_end) {
    int first = (int)(begin - tile_begin) / RUN, last = (int)(end - 1 - tile_begin) / RUN;
    if (first >= runs_begin && first < runs_end) copy_values(u, tile_begin, first, begin, end, u->scratch->edges[0]);
    if (last > first && last >= runs_begin && last < runs_end) copy_values(u, tile_begin, last, begin, end, u->scratch->edges[1]);
}

/* Whether keys are transposed in pairs of elements, as if a pair were one float32: half the work. */
FN int turns_pairs(const struct unit *u) { return DOT_BF16 || (u->dtype == BFLOAT16 && u->dim % LANES == 0); }

/* Transpose 16 keys, beginning at run r, to [step][key]; a step is an element, or with DOT_BF16 a pair of bfloat16 in 32 bits. The result is
 * written front to back: lines at a distance of 256 bytes, which are not in the L1 cache, took three times as long. */
SHARED void pack_key_vector(const struct unit *u, int r, float *to) {
    const int in_pairs = turns_pairs(u), is_widened = in_pairs && !DOT_BF16;
    const int dtype = in_pairs ? FLOAT32 : u->dtype, token_steps = in_pairs ? u->dim / 2 : u->dim;
    const int64_t step_bytes = in_pairs ? 4 : u->element_bytes, token_bytes = (int64_t)u->dim * u->element_bytes;
    for (int step = 0; step < (DOT_BF16 ? u->steps : token_steps); step += LANES) {
        int count = token_steps - step < LANES ? token_steps - step : LANES;
        v16 rows[LANES];
        for (int i = 0; i < RUN; i++) {
            int64_t offset = i * token_bytes + step * step_bytes;
            rows[i] = v_load_elements(u->k_runs[r] + offset, dtype, count);
            rows[i + RUN] = v_load_elements(u->k_runs[r + 1] + offset, dtype, count);
        }
        v_transpose(rows);
        if (is_widened) {
            for (int i = 0; i < count; i++, to += 2 * LANES) {
                v_store(to, v_bfloat_low(rows[i]));
                v_store(to + LANES, v_bfloat_high(rows[i]));
            }
        } else if (count == LANES || MATRIX_REGISTERS) { /* AMX multiplies 16 steps: store zeros after the last one */
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++, to += LANES) v_store(to, rows[i]);
        } else {
            for (int i = 0; i < count; i++, to += LANES) v_store(to, rows[i]);
        }
    }
}

FN void pack_keys(struct unit *u) {
    for (int r = u->runs_begin; r < u->runs_end; r += 2) {
        if (MATRIX_REGISTERS) {
            read_values_ahead(u, 2 * run_lines(u));
        } else {
            read_ahead(u, run_lines(u));
        }
        pack_key_vector(u, r, u->k + (int64_t)r * RUN * u->steps);
    }
}

#if DOT_BF16
enum { RUN_STEPS = RUN / 2 };

/* Permutation that makes the first 16 pairs of 32 elements of two tokens; for the other 16 pairs add 16 to each index. */
#define FIRST_PAIRS _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, \
                                     37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0)

/* Pack the values of a run as [step][padded]; a step has pairs of two tokens' elements. */
FN const float *packed_values(struct unit *u, int r) {
    const __m512i low = FIRST_PAIRS, high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    float *packed = u->v + (int64_t)r * RUN_STEPS * u->padded;
    for (int pair = 0; pair < RUN_STEPS; pair++) {
        read_ahead(u, MATRIX_REGISTERS ? 2 : run_lines(u) / RUN_STEPS / 2);
        const uint16_t *even = (const uint16_t *)u->v_runs[r] + 2 * pair * u->dim, *odd = even + u->dim;
        float *to = packed + (int64_t)pair * u->padded;
        for (int column = 0; column < u->dim; column += 32) {
            int count = u->dim - column < 32 ? u->dim - column : 32;
            __mmask32 m = count == 32 ? 0xffffffffu : (1u << count) - 1;
            __m512i a = _mm512_maskz_loadu_epi16(m, even + column), b = _mm512_maskz_loadu_epi16(m, odd + column);
            _mm512_storeu_si512(to + column, _mm512_permutex2var_epi16(a, low, b));
            if (count > 16) _mm512_storeu_si512(to + column + 16, _mm512_permutex2var_epi16(a, high, b));
        }
    }
    return packed;
}

FN v16 dot(v16 a, v16 b, v16 c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
#else
enum { RUN_STEPS = RUN };

/* Pack the values of a run as [step][padded] float32; a step is a token. Returns the page itself if it already has this form. */
FN const float *packed_values(struct unit *u, int r) {
    if (u->dtype == FLOAT32 && u->dim == u->padded) return (const float *)u->v_runs[r];
    float *packed = u->v + (int64_t)r * RUN_STEPS * u->padded;
    for (int i = 0; i < RUN; i++) {
        const char *token = u->v_runs[r] + (int64_t)i * u->dim * u->element_bytes;
        for (int column = 0; column < u->dim; column += LANES) {
            int count = u->dim - column < LANES ? u->dim - column : LANES;
            v16 x = v_load_elements(token + (int64_t)column * u->element_bytes, u->dtype, count);
            v_store(packed + (int64_t)i * u->padded + column, x);
        }
    }
    return packed;
}

FN v16 dot(v16 a, v16 b, v16 c) { return v_fma(a, b, c); }
#endif

/* Memory of a row's scores, then its weights. With matrix registers the blocks of rows reuse the same memory. */
FN float *scores_of(const struct unit *u, int row) { return u->scratch->scores + (MATRIX_REGISTERS ? row % BLOCK_ROWS : row) * TILE; }

/* Whether keys and values are read in place: packing them does not pay if the tile has only one block of rows. */
FN int rows_stay(int64_t dtype, int64_t dim, int64_t rows) {
    const int most_rows = MATRIX_REGISTERS ? LANES : BLOCK_ROWS;
    return dtype == BFLOAT16 && rows <= most_rows && dim % (PAGE_VECTORS(rows) * LANES) == 0;
}

FN int pages_stay(const struct unit *u) { return rows_stay(u->dtype, u->dim, u->rows); }

FN void pack_values(struct unit *u) {
    for (int r = u->runs_begin; r < u->runs_end; r++) {
        if (!DOT_BF16) read_ahead(u, run_lines(u) / 2);
        u->v_runs[r] = (const char *)packed_values(u, r);
    }
}

/* Query rows that share registers, and the range of the tile's keys that some of these rows see, rounded to whole vectors. */
struct row_block {
    int row, rows, begin, end;
};

FN void divide_rows(const struct unit *u, int64_t tile_begin, struct row_block *blocks) {
    const struct attention_call *c = u->call;
    const int64_t begin_of_tile = u->runs_begin * RUN, end_of_tile = u->runs_end * RUN;
    for (int row = 0; row < u->rows; row += BLOCK_ROWS, blocks++) {
        int rows = u->rows - row < BLOCK_ROWS ? u->rows - row : BLOCK_ROWS;
        int64_t token = u->tile->first_token + row / u->group, last = u->tile->first_token + (row + rows - 1) / u->group;
        int64_t begin = c->plan.key_begin[token], end = c->plan.key_end[token];
        while (token++ < last) {
            if (c->plan.key_begin[token] < begin) begin = c->plan.key_begin[token];
            if (c->plan.key_end[token] > end) end = c->plan.key_end[token];
        }
        begin -= tile_begin;
        end -= tile_begin;
        begin = begin > begin_of_tile ? begin / LANES * LANES : begin_of_tile;
        end = end < end_of_tile ? (end + LANES - 1) / LANES * LANES : end_of_tile;
        if (begin > end) begin = end = begin_of_tile; /* the block sees no key of the tile */
        *blocks = (struct row_block){row, rows, (int)begin, (int)end};
    }
}

/* Whether scores are scaled after `top_score`: a positive factor does not change which score is the maximum. */
FN int scales_late(const struct attention_call *c) { return c->softcap <= 0 && c->scale > 0; }

FN float late_factor(const struct attention_call *c) { return scales_late(c) ? c->scale * LOG2_E : 1.0f; }

/* Return the largest score of a row, in base 2, and set the scores of keys that it does not see to -inf. */
FN float top_score(const struct unit *u, int64_t tile_begin, const struct row_block *block, int row) {
    const struct attention_call *c = u->call;
    int64_t token = u->tile->first_token + row / u->group;
    int64_t seen_begin = c->plan.key_begin[token] - tile_begin, seen_end = c->plan.key_end[token] - tile_begin;
    const v16 hidden = v_set1(-__builtin_inff());
    const int is_late = scales_late(c);
    float *scores = scores_of(u, row);
    v16 top = hidden;
    for (int key = block->begin; key < block->end; key += LANES) {
        v16 x = v_load(scores + key);
        int is_edge = seen_begin > key || seen_end < key + LANES;
        if (c->softcap > 0) {
            x = v_tanh(v_mul(x, v_set1(c->scale / c->softcap)));
            x = v_mul(x, v_set1(c->softcap * LOG2_E));
        } else if (!is_late) {
            x = v_mul(x, v_set1(c->scale * LOG2_E));
        }
        if (is_edge) {
            int64_t low = seen_begin - key, high = seen_end - key;
            low = low < 0 ? 0 : low > LANES ? LANES : low;
            high = high < 0 ? 0 : high > LANES ? LANES : high;
            x = v_keep(x, (int)low, (int)high, hidden);
        }
        if (is_edge || !is_late) v_store(scores + key, x);
        top = v_max(top, x);
    }
    return v_hmax(top) * late_factor(c);
}

#if DOT_BF16
/* Add both elements of each pair to `total`. */
FN v16 add_pairs(v16 total, v16 pairs) {
#if MATRIX_REGISTERS /* on processors with AMX a vector product of pairs takes three times as long */
    return v_add(v_add(total, v_bfloat_low(pairs)), v_bfloat_high(pairs));
#else
    return dot(pairs, (v16)_mm512_set1_epi16(0x3f80), total);
#endif
}
#endif

/* Replace the scores of a row by weights 2^(score - base); returns `total`, the 16 partial sums, with the weights added.
 * With DOT_BF16 the weights are pairs of bfloat16 in the first half of the row. */
FN v16 weigh(const struct unit *u, const struct row_block *block, int row, v16 base, v16 total) {
    const v16 factor = v_set1(late_factor(u->call));
    float *scores = scores_of(u, row);
#if DOT_BF16
    const v16 minus_base = v_sub(v_set1(0.0f), base);
    for (int key = block->begin / 32 * 32; key < block->end; key += 32) {
        v16 low = v_set1(0.0f), high = low;
        if (key >= block->begin) low = v_short_exp2(v_fma(v_load(scores + key), factor, minus_base));
        if (key + LANES < block->end) high = v_short_exp2(v_fma(v_load(scores + key + LANES), factor, minus_base));
        v16 pairs = (v16)_mm512_cvtne2ps_pbh(high, low);
        total = add_pairs(total, pairs);
        v_store(scores + key / 2, pairs);
    }
#else
    for (int key = block->begin; key < block->end; key += LANES) {
        v16 weight = v_exp2(v_sub(v_mul(v_load(scores + key), factor), base));
        total = v_add(total, weight);
        v_store(scores + key, weight);
    }
#endif
    return total;
}

/* One step of the online softmax for some blocks: replace scores by weights, update the running maximum and sum, and store the factors of the
 * previous sums in scratch->factors. If these are not all blocks, their rows begin at a multiple of LANES. */
FN void soften(const struct unit *u, int64_t tile_begin, const struct row_block *blocks, int count, struct row_state *state) {
    float tops[MAX_ROWS], bases[MAX_ROWS], *factors = u->scratch->factors;
    const int begin = blocks->row, end = blocks[count - 1].row + blocks[count - 1].rows;
    for (const struct row_block *b = blocks; b < blocks + count; b++)
        for (int row = b->row; row < b->row + b->rows; row++) tops[row] = top_score(u, tile_begin, b, row);
    for (int row = end; row % LANES; row++) tops[row] = 0.0f;
    for (int row = begin; row < end; row += LANES) {
        v16 old = v_load(state->top + row), top = v_max(v_load(tops + row), old);
        v16 base = v_where_less(top, v_set1(-3e38f), v_set1(0.0f), top); /* no key seen yet: all weights are 0 */
        v_store(factors + row, v_exp2(v_sub(old, base)));
        v_store(bases + row, base);
        v_store(state->top + row, top);
    }
    for (const struct row_block *b = blocks; b < blocks + count; b++)
        for (int row = b->row; row < b->row + b->rows; row++) {
            float *total = state->total + row * LANES;
            v_store(total, weigh(u, b, row, v_set1(bases[row]), v_mul(v_load(total), v_set1(factors[row]))));
        }
}

/* Begin a tile: find its runs, and the keys that each block sees. */
FN void begin_tile(struct unit *u, int64_t tile_begin, int64_t begin, int64_t end, struct row_block *blocks) {
    locate_runs(u, tile_begin, begin, end);
    divide_rows(u, tile_begin, blocks);
}

FN void pack_tile(struct unit *u, int64_t tile_begin, int64_t begin, int64_t end) {
    pack_keys(u);
    copy_edges(u, tile_begin, begin, end, u->runs_begin, u->runs_end);
    pack_values(u);
}

FN struct row_state state_of(const struct unit *u, enum state number) { return u->scratch->states[number]; }

/* Add the keys [begin, end) of one split to a state of each head. */
SHARED void attend_tiles(struct unit *u, int64_t begin, int64_t end, enum state number);

#if MATRIX_REGISTERS
#include "attention_matrix.h"
#else
#include "attention_vectors.h"
#endif

FN void clear(struct unit *u, enum state number) {
    for (int h = 0; h < u->heads; h++) {
        show_head(u, h, 0, 0);
        struct row_state state = state_of(u, number);
        for (int row = 0; row < (u->rows + LANES - 1) / LANES * LANES; row++) state.top[row] = -__builtin_inff();
        memset(state.total, 0, sizeof(float) * LANES * u->rows);
        memset(state.mixed, 0, sizeof(float) * u->padded * u->rows);
    }
}

/* Merge one split's result for one row. */
FN void merge(const struct unit *u, int row, float top, const float *total, const float *mixed,
              struct row_state *into) {
    float old = into->top[row], new = top > old ? top : old;
    float base = new == -__builtin_inff() ? 0.0f : new;
    float factor[2][LANES];
    v_store(factor[0], v_exp2(v_set1(old - base)));
    v_store(factor[1], v_exp2(v_set1(top - base)));
    v16 keep = v_set1(factor[0][0]), add = v_set1(factor[1][0]);
    float *sum = into->total + row * LANES, *to = into->mixed + row * u->padded;
    v_store(sum, v_fma(v_load(total), add, v_mul(v_load(sum), keep)));
    for (int i = 0; i < u->padded; i += LANES)
        v_store(to + i, v_fma(v_load(mixed + i), add, v_mul(v_load(to + i), keep)));
    into->top[row] = new;
}

FN void merge_all(struct unit *u, enum state number, enum state into_number) {
    for (int h = 0; h < u->heads; h++) {
        show_head(u, h, 0, 0);
        struct row_state part = state_of(u, number), into = state_of(u, into_number);
        for (int row = 0; row < u->rows; row++) merge(u, row, part.top[row], part.total + row * LANES, part.mixed + row * u->padded, &into);
    }
}

/* Divide by the sum of the weights, the sink's included, and store the result; zeros if no key is seen. */
FN void finish(const struct unit *u) {
    const struct attention_call *c = u->call;
    const struct row_state whole = state_of(u, WHOLE), *state = &whole;
    for (int row = 0; row < u->rows; row++) {
        int64_t token = token_of(u, row), head = head_of(u, row);
        float top = state->top[row], total = v_sum(v_load(state->total + row * LANES)), factor = 1.0f;
        if (c->sinks) {
            float sink = c->sinks[head] * LOG2_E, base = top > sink ? top : sink, lane[LANES];
            v_store(lane, v_exp2(v_set1(top - base)));
            factor = lane[0];
            v_store(lane, v_exp2(v_set1(sink - base)));
            total = total * factor + lane[0];
        }
        char *out = (char *)c->out + (token * c->out_token_stride + head * u->dim) * u->element_bytes;
        const float *mixed = state->mixed + row * u->padded;
        int column = 0;
#if DOT_BF16
        factor = total == 0.0f ? 0.0f : factor / total; /* one division per row: 16 divisions cost as much as mixing 16 columns */
        for (; column + 2 * LANES <= u->dim; column += 2 * LANES) {
            v16 low = v_mul(v_load(mixed + column), v_set1(factor)), high = v_mul(v_load(mixed + column + LANES), v_set1(factor));
            _mm512_storeu_si512(out + (int64_t)column * 2, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
#endif
        for (; column < u->dim; column += LANES) {
            int count = u->dim - column < LANES ? u->dim - column : LANES;
            v16 x = v_mul(v_load(mixed + column), v_set1(factor));
            if (!DOT_BF16) x = total == 0.0f ? v_set1(0.0f) : v_div(x, v_set1(total));
            v_store_elements(out + (int64_t)column * u->element_bytes, u->dtype, count, x);
        }
    }
}

FN float *partial_of(const struct unit *u, int64_t split, int row) {
    int64_t number = split - u->tile->key_begin / SPLIT;
    number = u->tile->first_partial + (number * u->call->kv_heads + u->head) * u->rows + row;
    return u->call->plan.partials + number * row_floats(u->dim);
}

FN void save_partial(const struct unit *u, int64_t split) {
    const struct row_state part = state_of(u, PART), *state = &part;
    for (int row = 0; row < u->rows; row++) {
        float *to = partial_of(u, split, row);
        to[0] = state->top[row];
        memcpy(to + LANES, state->total + row * LANES, LANES * sizeof(float));
        memcpy(to + 2 * LANES, state->mixed + row * u->padded, u->padded * sizeof(float));
    }
}

FN void load_partial(const struct unit *u, int64_t split, struct row_state *state) {
    for (int row = 0; row < u->rows; row++) {
        const float *from = partial_of(u, split, row);
        state->top[row] = from[0];
        memcpy(state->total + row * LANES, from + LANES, LANES * sizeof(float));
        memcpy(state->mixed + row * u->padded, from + 2 * LANES, u->padded * sizeof(float));
    }
}

/* Process an item's keys. The first split is added to the state `whole`. Every other split is added to `part`, which is merged into `whole` at
 * the end of the split or of the tile. A trunk's last split is not merged: its branches continue it. */
FN void attend_keys(struct unit *u, const struct item *item, enum state part, enum state whole) {
    const int64_t first = item->tile->key_begin;
    if (item->begin == first) clear(u, whole);
    for (int64_t split = item->begin / SPLIT; split * SPLIT < item->end; split++) {
        int64_t begin = split * SPLIT, end = begin + SPLIT;
        const enum state state = split == first / SPLIT ? whole : part;
        if (begin >= item->begin && state == part) clear(u, part);
        begin = begin > item->begin ? begin : item->begin;
        attend_tiles(u, begin, end < item->end ? end : item->end, state);
        if (state == part && (end <= item->end || !item->tile->branches)) merge_all(u, part, whole);
    }
}

/* Process splits of a tile that is split into several units. The thread that completes the last split merges all splits, in the same order as
 * an unsplit unit, and resets the counter for the next layer. */
FN void attend_partials(struct unit *u, const struct item *item) {
    const struct work_unit *work = item->work;
    for (int64_t split = work->split_begin; split < work->split_end; split++) {
        int64_t begin = split * SPLIT, end = begin + SPLIT;
        clear(u, PART);
        attend_tiles(u, begin > item->begin ? begin : item->begin, end < item->end ? end : item->end, PART);
        for (int h = 0; h < u->heads; h++) {
            show_head(u, h, 0, 0);
            save_partial(u, split);
        }
    }
    int32_t done = (int32_t)(work->split_end - work->split_begin);
    for (int h = 0; h < u->heads; h++) {
        show_head(u, h, 0, 0);
        int32_t *missing = u->call->plan.missing + work->tile * u->call->kv_heads + u->head;
        if (__atomic_sub_fetch(missing, done, __ATOMIC_ACQ_REL) > 0) continue;
        __atomic_store_n(missing, tile_splits(u->tile), __ATOMIC_RELAXED);
        struct row_state whole = state_of(u, WHOLE);
        int64_t split = u->tile->key_begin / SPLIT;
        load_partial(u, split, &whole);
        while (++split * SPLIT < u->tile->key_end)
            for (int row = 0; row < u->rows; row++) {
                const float *from = partial_of(u, split, row);
                merge(u, row, from[0], from + LANES, from + 2 * LANES, &whole);
            }
        finish(u);
    }
}

/* Copy the rows of a branch from a trunk's state, where they begin at row `first`. */
FN void copy_rows(const struct unit *u, const struct row_state *trunk, int first, struct row_state *to) {
    memcpy(to->top, trunk->top + first, sizeof(float) * u->rows);
    memcpy(to->total, trunk->total + first * LANES, sizeof(float) * LANES * u->rows);
    memcpy(to->mixed, trunk->mixed + (int64_t)first * u->padded, sizeof(float) * u->padded * u->rows);
}

/* Process one item. The branches of a trunk are the items after it. */
FN void attend_item(struct unit *u, const struct item *item) {
    for (int h = 0; h < u->heads; h++) {
        show_head(u, h, 0, 0);
        load_queries(u);
    }
    if (u->tile->first_partial >= 0) {
        attend_partials(u, item);
        return;
    }
    if (u->tile->branches) {
        attend_keys(u, item, TRUNK_PART, TRUNK_WHOLE);
        return;
    }
    const struct query_tile *trunk = &u->call->plan.tiles[item->work->tile];
    if (trunk != u->tile) { /* a branch: its item has one head */
        int first = (int)(u->tile->first_token - trunk->first_token) * u->group;
        struct row_state part = state_of(u, PART), whole = state_of(u, WHOLE);
        struct row_state trunk_part = state_of(u, TRUNK_PART), trunk_whole = state_of(u, TRUNK_WHOLE);
        copy_rows(u, &trunk_whole, first, &whole);
        copy_rows(u, &trunk_part, first, &part);
    }
    attend_keys(u, item, PART, WHOLE);
    for (int h = 0; h < u->heads; h++) {
        show_head(u, h, 0, 0);
        finish(u);
    }
}

/* The item with a number from the team; no tile for a negative number. A thread takes the heads of one unit in order, whose pages are
 * contiguous, then those of the next unit. */
FN struct item item_of(const struct attention_call *call, int64_t number) {
    struct item item = {0};
    const int64_t unit_items = call->kv_heads / call->item_heads;
    if (number < 0) return item;
    item.work = &call->plan.units[number / unit_items];
    item.tile = &call->plan.tiles[item.work->tile];
    item.head = number % unit_items * call->item_heads;
    item.branches = item.tile->branches;
    int64_t begin = item.work->split_begin * SPLIT, end = item.work->split_end * SPLIT;
    item.begin = begin > item.tile->key_begin ? begin : item.tile->key_begin;
    item.end = end < item.tile->key_end ? end : item.tile->key_end;
    return item;
}

/* The item after `now`: a branch of the same trunk, or the next item of the thread's own share; no tile if that is used up. */
FN struct item item_after(struct attention_call *call, struct member *member, const struct item *now) {
    if (!now->branches) return item_of(call, team_take_own(call->team, member));
    struct item item = *now;
    item.tile++;
    item.branches--;
    item.begin = call->plan.tiles[item.work->tile].key_end;
    item.end = item.tile->key_end;
    return item;
}

/* Set the memory of each head of an item: LANES rows of the same arrays, because states are read 16 rows at a time. */
FN void place_views(struct scratch *views, const struct unit *u) {
    for (int64_t h = 1; h < u->heads; h++) {
        struct scratch *view = &views[h];
        *view = views[0];
        view->q += h * LANES * u->steps;
        view->scores += h * LANES * TILE;
        view->factors += h * LANES;
        for (int i = 0; i < NUM_STATES; i++) {
            view->states[i].mixed += h * LANES * u->padded;
            view->states[i].total += h * LANES * LANES;
            view->states[i].top += h * LANES;
        }
    }
}

/* Whether items may have several heads: all tiles must be read in place with vector registers, and none may be a trunk, whose branches are
 * processed for one head. */
TARGETED int64_t TAKES_HEADS(const struct attention_call *call) {
    const int group = (int)(call->heads / call->kv_heads);
    if (MATRIX_REGISTERS) return 0;
    for (int64_t t = 0; t < call->plan.num_tiles; t++) {
        const struct query_tile *tile = &call->plan.tiles[t];
        if (tile->branches || !rows_stay(call->dtype, call->head_dim, tile->num_tokens * group)) return 0;
    }
    return 1;
}

TARGETED void EXP2(const float *x, float *y, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) v_store(y + i, v_exp2(v_load(x + i)));
}

TARGETED int64_t WORKER(void *argument) {
    struct attention_call *call = argument;
    struct unit u = {.call = call};
    struct member member = team_join(call->team);
    int64_t done = 0;
    struct scratch views[MAX_ITEM_HEADS];
    place_scratch(&views[0], call->plan.scratch + member.thread * call->plan.scratch_stride, call->head_dim);
    u.views = u.scratch = views;
    u.heads = (int)call->item_heads;
    u.group = (int)(call->heads / call->kv_heads);
    u.dim = (int)call->head_dim;
    u.padded = (int)padded_dim(call->head_dim);
    u.dtype = (int)call->dtype;
    u.element_bytes = call->dtype == FLOAT32 ? 4 : 2;
    u.steps = DOT_BF16 ? u.dim / 2 : u.dim;
    if (MATRIX_REGISTERS) u.steps = (u.steps + LANES - 1) / LANES * LANES;
    u.piece_runs = call->block_size % LANES || call->block_size > TILE ? 2 : (int)call->block_size / RUN;
    place_views(views, &u);
    memset(u.scratch->zeros, 0, (size_t)RUN * u.dim * u.element_bytes);
#ifdef X86_FLUSH_DENORMALS
    unsigned modes = _mm_getcsr();
    _mm_setcsr(modes | 0x8040); /* flush denormals, as dpbf16 does in any case: a denormal costs 100 cycles */
#endif
#if MATRIX_REGISTERS
    set_extents();
#endif
    struct item item = {0}, next = {0};
    for (;;) {
        if (!next.tile) { /* this thread's share is used up: take an item of another thread */
            u.ahead.next = next = item_of(call, team_take(call->team, &member));
            if (!next.tile) break;
        }
        item = next;
        u.tile = item.tile;
        u.first_head = u.head = item.head;
        u.rows = (int)u.tile->num_tokens * u.group;
        u.blocks = (u.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        if (u.ahead.next.tile) { /* the prefetches have not reached this item yet */
            if (u.heads > 1) {
                read_next_pieces(&u);
                u.piece.asked = u.piece.used;
            } else {
                read_next_item(&u);
                u.ahead.keys = u.ahead.used;
            }
        }
        u.ahead.next = next = item_after(call, &member, &item);
        attend_item(&u, &item);
        done += !item.branches; /* the last branch completes a unit */
    }
#if MATRIX_REGISTERS
    _tile_release();
#endif
#ifdef X86_FLUSH_DENORMALS
    _mm_setcsr(modes);
#endif
    return done;
}
