/* The matrix products of attention in matrix registers (AMX): scores of a tile's keys, and weighted sums of its values. Included by
 * attention_tile.h.
 *
 *     scores [rows][keys] = q [rows][steps] . packed keys [16 keys][steps][key]          the tile has more than 16 rows
 *     scores^T [keys][rows] = pages [key][steps] . q^T [steps][rows]                     the keys are read in place
 *     mixed [rows][columns] += weights [rows][pairs] . packed values [pairs][columns]
 *
 * A register has 16 rows of 16 times 32 bits. Registers are always used completely; results beyond a unit's rows are not read. A score is a
 * sum over 32 elements of head_dim at a time, an element of the result a sum over 32 keys at a time, which begin at absolute positions.
 * The hardware adds up the first elements of the pairs and the second elements separately. Both ways to compute scores multiply the same
 * pairs in the same order.
 */
#include "matrix_registers.h"

enum { PAIRED_KEYS = 2 * REGISTER_ROWS, STAGED_KEYS = 4 * LANES, SPLIT_TILES = SPLIT / TILE };

FN void set_extents(void) {
    struct extents e = no_extents();
    for (int i = 0; i < 8; i++) set_extent(&e, i, REGISTER_ROWS, LANES);
    _tile_loadconfig(&e);
}

/* Fill scratch->q: [rows][steps], or [steps][16 rows] if the keys are read in place; zeros after a row's last step. */
FN void load_queries(struct unit *u) {
    const struct attention_call *c = u->call;
    const int is_turned = pages_stay(u), token_steps = u->dim / 2;
    for (int first = 0; first < u->rows; first += LANES) {
        for (int step = 0; step < u->steps; step += LANES) {
            int count = token_steps - step < LANES ? token_steps - step : LANES;
            v16 rows[LANES];
            for (int i = 0; i < LANES; i++) {
                rows[i] = v_set1(0.0f);
                if (first + i >= u->rows) continue;
                int64_t element = token_of(u, first + i) * c->q_token_stride + head_of(u, first + i) * c->q_head_stride;
                const uint16_t *q = (const uint16_t *)c->q + element;
                rows[i] = v_load_elements(q + 2 * step, FLOAT32, count);
            }
            if (is_turned) v_transpose(rows);
            float *to = u->scratch->q + (is_turned ? step * LANES : first * u->steps + step);
            for (int i = 0; i < LANES; i++) v_store(to + i * (is_turned ? LANES : u->steps), rows[i]);
        }
    }
}

/* Compute scores from packed keys for a block of up to 16 rows, or 32 if `tall`, and 16 keys, or 32 if `wide`. */
FN void score_block(const float *q, const float *keys, int steps, float *scores, int tall, int wide) {
    const int row_bytes = steps * 4, below = LANES * steps, beside = LANES * steps;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int step = 0; step < steps; step += REGISTER_ROWS, keys += REGISTER_ROWS * LANES) {
        _tile_loadd(4, q + step, row_bytes);
        _tile_loadd(6, keys, REGISTER_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        if (wide) {
            _tile_loadd(7, keys + beside, REGISTER_BYTES);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (!tall) continue;
        _tile_loadd(5, q + below + step, row_bytes);
        _tile_dpbf16ps(2, 5, 6);
        if (wide) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, scores, TILE * 4);
    if (wide) _tile_stored(1, scores + LANES, TILE * 4);
    if (tall) _tile_stored(2, scores + LANES * TILE, TILE * 4);
    if (tall && wide) _tile_stored(3, scores + LANES * TILE + LANES, TILE * 4);
}

/* Return 16 contiguous keys, beginning at run r: the page itself if both runs are contiguous, else a copy. */
FN const char *keys_together(const struct unit *u, int r, char *copy) {
    const int64_t bytes = run_bytes(u);
    if (u->k_runs[r + 1] == u->k_runs[r] + bytes) return u->k_runs[r];
    memcpy(copy, u->k_runs[r], bytes);
    memcpy(copy + bytes, u->k_runs[r + 1], bytes);
    return copy;
}

/* Compute scores of up to 16 rows with keys that are read in place. */
FN void score_pages(struct unit *u) {
    _Alignas(64) float staged[STAGED_KEYS * LANES];
    const int key_bytes = u->dim * 2;
    for (int r = u->runs_begin; r < u->runs_end; r += 2 * 4) {
        const int vectors = u->runs_end - r < 2 * 4 ? (u->runs_end - r) / 2 : 4;
        const char *keys[4];
        for (int i = 0; i < 4; i++) /* missing vectors repeat the last one */
            keys[i] = i < vectors ? keys_together(u, r + 2 * i, (char *)(u->k + i * LANES * u->steps)) : keys[i - 1];
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int step = 0; step < u->steps; step += REGISTER_ROWS) {
            _tile_loadd(4, u->scratch->q + step * LANES, REGISTER_BYTES);
            read_ahead(u, 1);
            _tile_loadd(5, keys[0] + step * 4, key_bytes);
            read_ahead(u, 1);
            _tile_loadd(6, keys[1] + step * 4, key_bytes);
            read_ahead(u, 1);
            _tile_loadd(7, keys[2] + step * 4, key_bytes);
            _tile_dpbf16ps(0, 5, 4);
            read_ahead(u, 1);
            _tile_loadd(5, keys[3] + step * 4, key_bytes);
            _tile_dpbf16ps(1, 6, 4);
            _tile_dpbf16ps(2, 7, 4);
            _tile_dpbf16ps(3, 5, 4);
        }
        _tile_stored(0, staged, REGISTER_BYTES);
        _tile_stored(1, staged + LANES * LANES, REGISTER_BYTES);
        _tile_stored(2, staged + 2 * LANES * LANES, REGISTER_BYTES);
        _tile_stored(3, staged + 3 * LANES * LANES, REGISTER_BYTES);
        for (int i = 0; i < vectors; i++) {
            v16 rows[LANES];
#pragma GCC unroll 16
            for (int key = 0; key < LANES; key++) rows[key] = v_load(staged + (i * LANES + key) * LANES);
            read_ahead(u, 4);
            v_transpose(rows);
            float *scores = u->scratch->scores + (r + 2 * i) * RUN;
            for (int row = 0; row < u->rows; row++) v_store(scores + row * TILE, rows[row]);
        }
    }
}

/* If the tile's keys do not begin or end at a multiple of 32, set the values of the 16 missing keys to zero. */
FN void complete_pairs(struct unit *u) {
    const size_t bytes = sizeof(float) * 2 * RUN_STEPS * u->padded;
    if (u->runs_begin % 4) memset(u->v + (int64_t)(u->runs_begin - 2) * RUN_STEPS * u->padded, 0, bytes);
    if (u->runs_end % 4) memset(u->v + (int64_t)u->runs_end * RUN_STEPS * u->padded, 0, bytes);
}

/* Multiply the previous sums of values by the rows' factors. */
FN void scale_mixed(const struct unit *u, const struct row_block *b, float *mixed) {
    for (int row = b->row; row < b->row + b->rows; row++) {
        float factor = u->scratch->factors[row], *to = mixed + (int64_t)row * u->padded;
        if (factor == 1.0f) continue;
        for (int i = 0; i < u->padded; i += LANES) v_store(to + i, v_mul(v_load(to + i), v_set1(factor)));
    }
}

/* Add the weighted values of `turns` times 32 keys, for the rows of a block and 16 columns, or 32 if `wide`. */
FN void mix_block(struct unit *u, const float *weights, const float *values, int padded, float *mixed, int turns, int tall, int wide) {
    const int stride = padded * 4;
    float *below = mixed + LANES * padded;
    _tile_loadd(0, mixed, stride);
    if (wide) _tile_loadd(1, mixed + LANES, stride);
    if (tall) _tile_loadd(2, below, stride);
    if (tall && wide) _tile_loadd(3, below + LANES, stride);
    for (; turns > 0; turns--, weights += REGISTER_ROWS, values += REGISTER_ROWS * padded) {
        if (!tall) read_ahead(u, 3);
        _tile_loadd(4, weights, TILE * 4);
        _tile_loadd(6, values, stride);
        _tile_dpbf16ps(0, 4, 6);
        if (wide) {
            _tile_loadd(7, values + LANES, stride);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (!tall) continue;
        _tile_loadd(5, weights + LANES * TILE, TILE * 4);
        _tile_dpbf16ps(2, 5, 6);
        if (wide) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, mixed, stride);
    if (wide) _tile_stored(1, mixed + LANES, stride);
    if (tall) _tile_stored(2, below, stride);
    if (tall && wide) _tile_stored(3, below + LANES, stride);
}

/* Add a block's weights times the tile's values, 32 columns at a time. */
FN void mix_values(struct unit *u, const struct row_block *b, float *all_mixed) {
    const int first = b->begin / PAIRED_KEYS, turns = (b->end + PAIRED_KEYS - 1) / PAIRED_KEYS - first, tall = b->rows > REGISTER_ROWS;
    const float *weights = scores_of(u, b->row) + first * REGISTER_ROWS;
    const float *values = u->v + (int64_t)first * REGISTER_ROWS * u->padded;
    float *mixed = all_mixed + (int64_t)b->row * u->padded;
    scale_mixed(u, b, all_mixed);
    for (int column = 0; column < u->padded; column += 2 * LANES) {
        const int wide = column + LANES < u->padded;
        if (tall && wide) {
            mix_block(u, weights, values + column, u->padded, mixed + column, turns, 1, 1);
        } else {
            mix_block(u, weights, values + column, u->padded, mixed + column, turns, tall, wide);
        }
    }
}

/* Process the tile for one block of rows: scores, weights, values. */
FN void attend_block(struct unit *u, int64_t tile_begin, const struct row_block *b, struct row_state *state) {
    const int tall = b->rows > REGISTER_ROWS;
    const float *q = u->scratch->q + (int64_t)b->row * u->steps;
    float *scores = scores_of(u, b->row);
    for (int key = b->begin; key < b->end; key += 2 * LANES) {
        const float *keys = u->k + (int64_t)key * u->steps;
        const int wide = key + LANES < b->end;
        if (tall && wide) {
            score_block(q, keys, u->steps, scores + key, 1, 1);
        } else {
            score_block(q, keys, u->steps, scores + key, tall, wide);
        }
    }
    soften(u, tile_begin, b, 1, state);
    mix_values(u, b, state->mixed);
}

/* Process the tile for up to 16 rows, with keys that are read in place. */
FN void attend_pages(struct unit *u, int64_t tile_begin, int64_t begin, int64_t end, const struct row_block *b, struct row_state *state) {
    score_pages(u);
    read_ahead(u, 8);
    soften(u, tile_begin, b, 1, state);
    read_ahead(u, 8);
    copy_edges(u, tile_begin, begin, end, u->runs_begin, u->runs_end);
    pack_values(u);
    complete_pairs(u);
    mix_values(u, b, state->mixed);
}

/* Pack all tiles first, into the L2 cache. Then process one block of rows after the other, so that a block's state and scores stay in
 * the L1 cache. */
SHARED void attend_tiles(struct unit *u, int64_t begin, int64_t end, enum state number) {
    struct row_block blocks[SPLIT_TILES][MAX_BLOCKS];
    struct row_state state = state_of(u, number);
    const int64_t first = begin / TILE, k_floats = (int64_t)TILE * u->steps, v_floats = (int64_t)TILE / 2 * u->padded;
    const int tiles = (int)((end + TILE - 1) / TILE - first), stay = pages_stay(u);
    u->k = u->scratch->k;
    u->v = u->scratch->v;
    for (int i = 0; i < tiles; i++) {
        const int64_t tile = (first + i) * TILE, low = tile > begin ? tile : begin, high = tile + TILE < end ? tile + TILE : end;
        begin_tile(u, tile, low, high, blocks[i]);
        if (stay) {
            attend_pages(u, tile, low, high, blocks[i], &state);
        } else {
            pack_tile(u, tile, low, high);
            complete_pairs(u);
            u->k += k_floats;
            u->v += v_floats;
        }
    }
    if (stay) return;
    for (int block = 0; block < u->blocks; block++) {
        u->k = u->scratch->k;
        u->v = u->scratch->v;
        for (int i = 0; i < tiles; i++, u->k += k_floats, u->v += v_floats)
            if (blocks[i][block].begin < blocks[i][block].end) attend_block(u, (first + i) * TILE, &blocks[i][block], &state);
    }
}
