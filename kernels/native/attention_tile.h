/* Paged attention of one work unit after the other; included once per instruction set.
 *
 * For a query row q, a token and one of its heads, over the keys it sees:
 *
 *     s_j = scale log2(e) q . k_j      m = max_j s_j      o = sum_j 2^(s_j - m) v_j / sum_j 2^(s_j - m)
 *
 *     keys       0 ........ 128 ....... 256 ....... 384 ....... 512 ........
 *     tiles      |  pack K, V; scores; m, sum, o   |           |  m starts anew
 *     splits     |<------- one partial softmax: m, sum, o ---->|<-- the next
 *
 * A tile's keys are transposed once, 16 keys a vector, and serve all query rows of the unit (up to MAX_ROWS: the
 * heads of the KV group times several tokens). So one score is the sum over head_dim in order in one lane, and one
 * element of o the sum over keys in order in one lane, whatever shares the registers with it. Tiles and splits
 * start at absolute positions, splits are merged in order, and a key that a row does not see adds an exact zero.
 * Hence a row's bits do not depend on the other rows, the chunk it came in, or the thread. With DOT_BF16
 * the products are of bfloat16 pairs (weights are rounded to bfloat16, their sum is that of the rounded ones),
 * else all elements are widened to float32.
 *
 * The products are in attention_vectors.h or, with MATRIX_REGISTERS, in attention_matrix.h.
 *
 * The includer defines FN, WORKER and EXP2 (the functions' names), DOT_BF16, MATRIX_REGISTERS, the rows of a block BLOCK_ROWS (in
 * vector registers at most 6) and there MAX_VECTORS (of 16 columns: 1 or 4), PAGE_VECTORS(rows), as many where values stay in
 * their pages, the cache AHEAD_LEVEL that is prefetched to (3: the first, 2: the second), and has included its simd_*.h.
 */
#include <string.h>

#include "attention_math.h"

/* A function of its own: inlined wherever they are called, a few were most of what there is to compile. */
#define SHARED TARGETED static __attribute__((noinline))

enum { RUNS = TILE / RUN, MAX_BLOCKS = (MAX_ROWS + BLOCK_ROWS - 1) / BLOCK_ROWS };

/* A work unit and a KV head, which a thread takes, or a branch of one; no tile: none. */
struct item {
    const struct work_unit *work;
    const struct query_tile *tile;
    int64_t head, begin, end;      /* KV head; keys */
    int64_t branches;              /* that follow it */
};

/* Where runs of 8 tokens lie, one after the other: a division an item, not one a run. */
struct run_cursor {
    const int64_t *table;          /* of the row */
    int64_t block, within;         /* position / block_size, position % block_size */
    int64_t head_elements;         /* from a block's begin to the head's */
};

/* What a thread will read, asked of memory some runs ahead: a few lines of keys and of values with every step of the work, and those of
 * its next item near the end of this one. So memory is busy all the time, with what comes in another order than its own prefetchers
 * could know. Asked for in one go before 16 keys are scored, or the values of 8 are mixed, what they take and the memory's time
 * added up: a step of 16 to 30 rows took 1.2 to 1.5 times as long (Zen 5, all builds). */
enum { READ_AHEAD = 16, READ_RING = 64 };
struct read_ahead {
    struct item next;              /* after the one that is read; its tile is NULL once it is that one */
    struct run_cursor at;
    int64_t position, end;         /* keys of the item that is read */
    int64_t tile, used;            /* runs of this thread before the tile, and with it */
    int64_t keys, values;          /* runs whose keys, whose values are asked for, or were used before */
    const char *key_line, *key_end, *value_line, *value_end; /* what is left to ask of a run */
    int64_t runs[READ_RING];       /* bytes from the begin of either cache; of the last `keys` */
};

struct unit {
    const struct attention_call *call;
    const struct scratch *scratch;
    struct read_ahead ahead;
    const struct query_tile *tile;
    int64_t head;                       /* of the KV heads */
    int group, rows;                    /* query heads of a KV head; rows = tokens * group */
    int blocks;                         /* of BLOCK_ROWS rows */
    int dim, padded;                    /* elements of a head; rounded up to LANES */
    int dtype, element_bytes;
    int steps;                          /* of a product over head_dim: elements, or pairs of them */
    int runs_begin, runs_end;           /* of the tile, that hold a key */
    const char *k_runs[RUNS], *v_runs[RUNS];
    float *k, *v;                       /* the tile's keys and values, packed */
};

FN struct run_cursor run_cursor_at(const struct unit *u, int64_t row, int64_t head, int64_t position) {
    const struct attention_call *c = u->call;
    return (struct run_cursor){c->plan.block_tables + row * c->plan.table_stride, position / c->block_size, position % c->block_size,
                               head * c->block_size * c->head_dim};
}

/* Bytes from a cache's begin to the cursor's run; the cursor moves on. */
FN int64_t next_run(const struct unit *u, struct run_cursor *at) {
    const struct attention_call *c = u->call;
    int64_t element = at->table[at->block] * c->block_stride + at->head_elements + at->within * c->head_dim;
    at->within += RUN;
    if (at->within == c->block_size) {
        at->within = 0;
        at->block++;
    }
    return element * u->element_bytes;
}

/* The keys that are asked for next are those of the next item. */
FN void read_next_item(struct unit *u) {
    struct read_ahead *a = &u->ahead;
    a->position = a->next.begin / RUN * RUN;
    a->end = a->next.end;
    a->at = run_cursor_at(u, a->next.tile->row, a->next.head, a->position);
    a->next.tile = NULL;
}

/* Which flat query token and which of the heads a row of the unit is. */
FN int64_t token_of(const struct unit *u, int row) { return u->call->plan.tokens[u->tile->first_token + row / u->group]; }

FN int64_t head_of(const struct unit *u, int row) { return u->head * u->group + row % u->group; }

FN int run_lines(const struct unit *u) { return RUN * u->dim * u->element_bytes / 64; }

/* Ask for some lines of keys, for twice as many while it has to catch up. */
FN void read_keys_ahead(struct unit *u, int lines) {
    struct read_ahead *a = &u->ahead;
    if (a->keys + 2 < a->used + READ_AHEAD) lines *= 2;
    for (; lines > 0; lines--, a->key_line += 64) {
        if (a->key_line == a->key_end) {
            do {
                if (a->keys == a->used + READ_AHEAD) return;
                while (a->position >= a->end) { /* the next one may have no keys either */
                    if (!a->next.tile) return;
                    read_next_item(u);
                }
                a->runs[a->keys++ % READ_RING] = next_run(u, &a->at);
                a->position += RUN;
            } while (a->keys <= a->used);
            a->key_line = (const char *)u->call->k + a->runs[(a->keys - 1) % READ_RING];
            a->key_end = a->key_line + run_lines(u) * 64;
        }
        __builtin_prefetch(a->key_line, 0, AHEAD_LEVEL);
    }
}

/* The same of the values to those keys. */
FN void read_values_ahead(struct unit *u, int lines) {
    struct read_ahead *a = &u->ahead;
    if (a->values + 2 < a->keys) lines *= 2;
    for (; lines > 0; lines--, a->value_line += 64) {
        if (a->value_line == a->value_end) {
            if (a->values < a->tile) a->values = a->tile;
            if (a->values >= a->keys) return;
            a->value_line = (const char *)u->call->v + a->runs[a->values++ % READ_RING];
            a->value_end = a->value_line + run_lines(u) * 64;
        }
        __builtin_prefetch(a->value_line, 0, AHEAD_LEVEL);
    }
}

/* Of both: where the processor reads what comes next during all of its work, a few lines at a time. */
FN void read_ahead(struct unit *u, int lines) {
    read_keys_ahead(u, lines);
    read_values_ahead(u, lines);
}

/* Find the tile's runs. Those of a vector of 16 keys that has any are all there: zeros where no key is seen. */
FN void locate_runs(struct unit *u, int64_t tile_begin, int64_t begin, int64_t end) {
    u->runs_begin = (begin - tile_begin) / LANES * 2;
    u->runs_end = (end - tile_begin + LANES - 1) / LANES * 2;
    u->ahead.tile = u->ahead.used;
    struct run_cursor at = run_cursor_at(u, u->tile->row, u->head, begin / RUN * RUN);
    for (int r = u->runs_begin; r < u->runs_end; r++) {
        int64_t first = tile_begin + r * RUN;
        if (first + RUN <= begin || first >= end) {
            u->k_runs[r] = u->v_runs[r] = (const char *)u->scratch->zeros;
            continue;
        }
        int64_t offset = next_run(u, &at);
        u->k_runs[r] = (const char *)u->call->k + offset;
        u->v_runs[r] = (const char *)u->call->v + offset;
        u->ahead.used++;
    }
}

/* Of a run with tokens that no row sees: their memory may hold anything, and a weight of zero does not make that zero. The keys
 * may stay, since scores that are not seen are overwritten. */
FN void copy_values(struct unit *u, int64_t tile_begin, int r, int64_t begin, int64_t end, float *copy) {
    int64_t first = tile_begin + r * RUN, token_bytes = (int64_t)u->dim * u->element_bytes;
    int64_t low = begin > first ? begin - first : 0, high = end < first + RUN ? end - first : RUN;
    if (high - low == RUN) return;
    memset(copy, 0, RUN * token_bytes);
    memcpy((char *)copy + low * token_bytes, u->v_runs[r] + low * token_bytes, (high - low) * token_bytes);
    u->v_runs[r] = (const char *)copy;
}

FN void copy_edges(struct unit *u, int64_t tile_begin, int64_t begin, int64_t end) {
    int first = (int)(begin - tile_begin) / RUN, last = (int)(end - 1 - tile_begin) / RUN;
    copy_values(u, tile_begin, first, begin, end, u->scratch->edges[0]);
    if (last > first) copy_values(u, tile_begin, last, begin, end, u->scratch->edges[1]);
}

/* Whether keys are turned two elements at a time, as one float32 would be: half the work. */
FN int turns_pairs(const struct unit *u) { return DOT_BF16 || (u->dtype == BFLOAT16 && u->dim % LANES == 0); }

/* 16 keys, from a run on, to [step][key]; a step is an element, or with DOT_BF16 a pair of bfloat16 in 32 bits. Written front to back: lines
 * of 256 bytes' distance, which are not in the first-level cache, took three times as long. */
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
        } else if (count == LANES || MATRIX_REGISTERS) { /* they multiply 16 steps: zeros after the last */
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

/* Which elements of two tokens' 32 make up the first 16 pairs; the others are 16 further. */
#define FIRST_PAIRS _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, \
                                     37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0)

/* [step][padded]: pairs of two tokens' elements. */
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

/* [step][padded]: a token's elements in float32; the page itself where it has that form. */
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

/* Scores of the unit's row, then its weights: with matrix registers of one block after the other. */
FN float *scores_of(const struct unit *u, int row) { return u->scratch->scores + (MATRIX_REGISTERS ? row % BLOCK_ROWS : row) * TILE; }

/* Whether a tile serves one block of rows: packed for it alone, keys and values would cost more than they save. */
FN int pages_stay(const struct unit *u) {
    const int most_rows = MATRIX_REGISTERS ? LANES : BLOCK_ROWS;
    return u->dtype == BFLOAT16 && u->rows <= most_rows && u->dim % (PAGE_VECTORS(u->rows) * LANES) == 0;
}

FN void pack_values(struct unit *u) {
    for (int r = u->runs_begin; r < u->runs_end; r++) {
        if (!DOT_BF16) read_ahead(u, run_lines(u) / 2);
        u->v_runs[r] = (const char *)packed_values(u, r);
    }
}

/* Query rows that share register tiles, and the tile's keys that some of them see, rounded to whole vectors. */
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
        if (begin > end) begin = end = begin_of_tile; /* before or after all that they see */
        *blocks = (struct row_block){row, rows, (int)begin, (int)end};
    }
}

/* Whether scores are scaled after `top_score`: a positive factor moves no maximum. */
FN int scales_late(const struct attention_call *c) { return c->softcap <= 0 && c->scale > 0; }

FN float late_factor(const struct attention_call *c) { return scales_late(c) ? c->scale * LOG2_E : 1.0f; }

/* The largest score of a row, in base 2; what it does not see becomes -inf. */
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
/* total + both elements of each pair. */
FN v16 add_pairs(v16 total, v16 pairs) {
#if MATRIX_REGISTERS /* processors with these take three times as long for a product of pairs */
    return v_add(v_add(total, v_bfloat_low(pairs)), v_bfloat_high(pairs));
#else
    return dot(pairs, (v16)_mm512_set1_epi16(0x3f80), total);
#endif
}
#endif

/* Scores of a row to weights 2^(score - base), in place; returns the 16 partial sums with theirs added.
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

/* Scores of some blocks to weights, and the running maximum and sum; the factors for what was summed before to scratch->factors. Where
 * it is not all blocks, their rows begin at a multiple of LANES. */
FN void soften(const struct unit *u, int64_t tile_begin, const struct row_block *blocks, int count, struct row_state *state) {
    float tops[MAX_ROWS], bases[MAX_ROWS], *factors = u->scratch->factors;
    const int begin = blocks->row, end = blocks[count - 1].row + blocks[count - 1].rows;
    for (const struct row_block *b = blocks; b < blocks + count; b++)
        for (int row = b->row; row < b->row + b->rows; row++) tops[row] = top_score(u, tile_begin, b, row);
    for (int row = end; row % LANES; row++) tops[row] = 0.0f;
    for (int row = begin; row < end; row += LANES) {
        v16 old = v_load(state->top + row), top = v_max(v_load(tops + row), old);
        v16 base = v_where_less(top, v_set1(-3e38f), v_set1(0.0f), top); /* nothing seen yet: all weights are 0 */
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

/* From here on the tile is this one: where its keys lie, and which of them each block sees. */
FN void begin_tile(struct unit *u, int64_t tile_begin, int64_t begin, int64_t end, struct row_block *blocks) {
    locate_runs(u, tile_begin, begin, end);
    divide_rows(u, tile_begin, blocks);
}

FN void pack_tile(struct unit *u, int64_t tile_begin, int64_t begin, int64_t end) {
    pack_keys(u);
    copy_edges(u, tile_begin, begin, end);
    pack_values(u);
}

/* Add keys of one split to a state. */
SHARED void attend_tiles(struct unit *u, int64_t begin, int64_t end, struct row_state *state);

#if MATRIX_REGISTERS
#include "attention_matrix.h"
#else
#include "attention_vectors.h"
#endif

FN void clear(const struct unit *u, struct row_state *state) {
    for (int row = 0; row < MAX_ROWS; row++) state->top[row] = -__builtin_inff();
    memset(state->total, 0, sizeof(float) * LANES * u->rows);
    memset(state->mixed, 0, sizeof(float) * u->padded * u->rows);
}

/* Add one split's result for one row. */
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

FN void merge_all(const struct unit *u, const struct row_state *part, struct row_state *into) {
    for (int row = 0; row < u->rows; row++)
        merge(u, row, part->top[row], part->total + row * LANES, part->mixed + row * u->padded, into);
}

/* Divide by the sum of the weights, with the sink's where there is one, and store; zeros if no key is seen. */
FN void finish(const struct unit *u, struct row_state *state) {
    const struct attention_call *c = u->call;
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
        factor = total == 0.0f ? 0.0f : factor / total; /* 16 divisions cost as much as 16 columns' products with their values */
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

FN void save_partial(const struct unit *u, int64_t split, const struct row_state *state) {
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

FN struct row_state state_of(const struct unit *u, enum state number) {
    return u->scratch->states[number];
}

/* An item's keys, from its begin. The first split is summed into `whole`, each other one into `part`, which joins it where the split
 * ends or the tile does: a trunk's last one goes on in its branches. */
FN void attend_keys(struct unit *u, const struct item *item, struct row_state *part, struct row_state *whole) {
    const int64_t first = item->tile->key_begin;
    if (item->begin == first) clear(u, whole);
    for (int64_t split = item->begin / SPLIT; split * SPLIT < item->end; split++) {
        int64_t begin = split * SPLIT, end = begin + SPLIT;
        struct row_state *state = split == first / SPLIT ? whole : part;
        if (begin >= item->begin && state == part) clear(u, part);
        begin = begin > item->begin ? begin : item->begin;
        attend_tiles(u, begin, end < item->end ? end : item->end, state);
        if (state == part && (end <= item->end || !item->tile->branches)) merge_all(u, part, whole);
    }
}

/* Splits of a tile that several units share. Whoever completes it merges all of them, in the order in which one unit would have, and
 * leaves the counter as it was, for the next layer. */
FN void attend_partials(struct unit *u, const struct item *item) {
    struct row_state part = state_of(u, PART), whole = state_of(u, WHOLE);
    const struct work_unit *work = item->work;
    for (int64_t split = work->split_begin; split < work->split_end; split++) {
        int64_t begin = split * SPLIT, end = begin + SPLIT;
        clear(u, &part);
        attend_tiles(u, begin > item->begin ? begin : item->begin, end < item->end ? end : item->end, &part);
        save_partial(u, split, &part);
    }
    int32_t done = (int32_t)(work->split_end - work->split_begin);
    int32_t *missing = u->call->plan.missing + work->tile * u->call->kv_heads + u->head;
    if (__atomic_sub_fetch(missing, done, __ATOMIC_ACQ_REL) > 0) return;
    __atomic_store_n(missing, tile_splits(u->tile), __ATOMIC_RELAXED);
    int64_t split = u->tile->key_begin / SPLIT;
    load_partial(u, split, &whole);
    while (++split * SPLIT < u->tile->key_end)
        for (int row = 0; row < u->rows; row++) {
            const float *from = partial_of(u, split, row);
            merge(u, row, from[0], from + LANES, from + 2 * LANES, &whole);
        }
    finish(u, &whole);
}

/* A branch's rows of a trunk's state, which begin at row `first` of it. */
FN void copy_rows(const struct unit *u, const struct row_state *trunk, int first, struct row_state *to) {
    memcpy(to->top, trunk->top + first, sizeof(float) * u->rows);
    memcpy(to->total, trunk->total + first * LANES, sizeof(float) * LANES * u->rows);
    memcpy(to->mixed, trunk->mixed + (int64_t)first * u->padded, sizeof(float) * u->padded * u->rows);
}

/* One item after the other; the branches of a trunk follow it. */
FN void attend_item(struct unit *u, const struct item *item) {
    struct row_state part = state_of(u, PART), whole = state_of(u, WHOLE);
    struct row_state trunk_part = state_of(u, TRUNK_PART), trunk_whole = state_of(u, TRUNK_WHOLE);
    load_queries(u);
    if (u->tile->first_partial >= 0) {
        attend_partials(u, item);
    } else if (u->tile->branches) {
        attend_keys(u, item, &trunk_part, &trunk_whole);
    } else {
        const struct query_tile *trunk = &u->call->plan.tiles[item->work->tile];
        if (trunk != u->tile) {
            int first = (int)(u->tile->first_token - trunk->first_token) * u->group;
            copy_rows(u, &trunk_whole, first, &whole);
            copy_rows(u, &trunk_part, first, &part);
        }
        attend_keys(u, item, &part, &whole);
        finish(u, &whole);
    }
}

/* The item after another one: a branch of the same trunk, or what is claimed. A thread's items are the heads of one unit after those of
 * another, whose pages lie side by side. */
FN struct item next_item(struct attention_call *call, struct member *member, const struct item *now) {
    struct item item = {0};
    if (now->branches) {
        item = *now;
        item.tile++;
        item.branches--;
        item.begin = call->plan.tiles[item.work->tile].key_end;
        item.end = item.tile->key_end;
        return item;
    }
    int64_t number = team_take(call->team, member);
    if (number < 0) return item;
    item.work = &call->plan.units[number / call->kv_heads];
    item.tile = &call->plan.tiles[item.work->tile];
    item.head = number % call->kv_heads;
    item.branches = item.tile->branches;
    int64_t begin = item.work->split_begin * SPLIT, end = item.work->split_end * SPLIT;
    item.begin = begin > item.tile->key_begin ? begin : item.tile->key_begin;
    item.end = end < item.tile->key_end ? end : item.tile->key_end;
    return item;
}

TARGETED void EXP2(const float *x, float *y, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) v_store(y + i, v_exp2(v_load(x + i)));
}

TARGETED int64_t WORKER(void *argument) {
    struct attention_call *call = argument;
    struct unit u = {.call = call};
    struct member member = team_join(call->team);
    int64_t done = 0;
    struct scratch scratch;
    place_scratch(&scratch, call->plan.scratch + member.thread * call->plan.scratch_stride, call->head_dim);
    u.scratch = &scratch;
    u.group = (int)(call->heads / call->kv_heads);
    u.dim = (int)call->head_dim;
    u.padded = (int)padded_dim(call->head_dim);
    u.dtype = (int)call->dtype;
    u.element_bytes = call->dtype == FLOAT32 ? 4 : 2;
    u.steps = DOT_BF16 ? u.dim / 2 : u.dim;
    if (MATRIX_REGISTERS) u.steps = (u.steps + LANES - 1) / LANES * LANES;
    memset(u.scratch->zeros, 0, (size_t)RUN * u.dim * u.element_bytes);
#ifdef X86_FLUSH_DENORMALS
    unsigned modes = _mm_getcsr();
    _mm_setcsr(modes | 0x8040); /* what dpbf16 does anyhow; and a denormal costs 100 cycles */
#endif
#if MATRIX_REGISTERS
    set_extents();
#endif
    struct item item = {0}, next = next_item(call, &member, &item);
    u.ahead.next = next;
    while (next.tile) {
        item = next;
        u.tile = item.tile;
        u.head = item.head;
        u.rows = (int)u.tile->num_tokens * u.group;
        u.blocks = (u.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        if (u.ahead.next.tile) { /* not reached yet */
            read_next_item(&u);
            u.ahead.keys = u.ahead.used;
        }
        u.ahead.next = next = next_item(call, &member, &item);
        attend_item(&u, &item);
        done += !item.branches; /* a unit is done with its last branch */
    }
#if MATRIX_REGISTERS
    _tile_release();
#endif
#ifdef X86_FLUSH_DENORMALS
    _mm_setcsr(modes);
#endif
    return done;
}
