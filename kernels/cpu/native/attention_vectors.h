/* The matrix products of attention in vector registers: scores of a tile's keys, and weighted sums of its values. Included by
 * attention_tile.h. */

/* Fill scratch->q: [rows][steps]. */
FN void load_queries(struct unit *u) {
    const struct attention_call *c = u->call;
    for (int row = 0; row < u->rows; row++) {
        int64_t element = token_of(u, row) * c->q_token_stride + head_of(u, row) * c->q_head_stride;
        const char *q = (const char *)c->q + element * u->element_bytes;
        float *to = u->scratch->q + (int64_t)row * u->steps;
        if (DOT_BF16) {
            memcpy(to, q, (size_t)u->dim * u->element_bytes);
            continue;
        }
        for (int column = 0; column < u->dim; column += LANES) {
            int count = u->dim - column < LANES ? u->dim - column : LANES;
            v16 x = v_load_elements(q + (int64_t)column * u->element_bytes, u->dtype, count);
            if (count == LANES) {
                v_store(to + column, x);
            } else {
                float lane[LANES];
                v_store(lane, x);
                memcpy(to + column, lane, count * sizeof(float));
            }
        }
    }
}

/* scores[row][column] = sum over steps of q[row][step] * keys[column / 16][step][column % 16], `rows` by 16 * `vectors`. */
FN void score_block(int rows, int vectors, const float *q, const float *keys, int steps, float *scores) {
    v16 sums[BLOCK_ROWS][4];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) sums[i][j] = v_set1(0.0f);
    for (int step = 0; step < steps; step++) {
        v16 key[4];
        for (int j = 0; j < vectors; j++) key[j] = v_load(keys + (j * steps + step) * LANES);
        for (int i = 0; i < rows; i++) {
            v16 element = v_set1(q[i * steps + step]);
            for (int j = 0; j < vectors; j++) sums[i][j] = dot(element, key[j], sums[i][j]);
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) v_store(scores + i * TILE + j * LANES, sums[i][j]);
}

/* mixed[row][column] = factor[row] * mixed[row][column] + sum over the block's keys of weight * value. */
FN void mix_block(int rows, int vectors, const struct unit *u, const struct row_block *block, float *all_mixed, int column) {
    const float *weights = u->scratch->scores + block->row * TILE, *factors = u->scratch->factors + block->row;
    float *mixed = all_mixed + block->row * u->padded + column;
    v16 sums[BLOCK_ROWS][4];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++)
            sums[i][j] = v_mul(v_load(mixed + i * u->padded + j * LANES), v_set1(factors[i]));
    for (int r = block->begin / RUN; r < block->end / RUN; r++) {
        const float *values = (const float *)u->v_runs[r] + column;
        for (int step = 0; step < RUN_STEPS; step++) {
            v16 value[4];
            for (int j = 0; j < vectors; j++) value[j] = v_load(values + step * u->padded + j * LANES);
            for (int i = 0; i < rows; i++) {
                v16 weight = v_set1(weights[i * TILE + r * RUN_STEPS + step]);
                for (int j = 0; j < vectors; j++) sums[i][j] = dot(weight, value[j], sums[i][j]);
            }
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) v_store(mixed + i * u->padded + j * LANES, sums[i][j]);
}

#if DOT_BF16
/* Compute the scores of all rows with keys that are read in place: transposed in registers, with the same sums. */
FN void score_pages(int rows, struct unit *u, int begin, int end) {
    const float *q = u->scratch->q;
    const int64_t token_steps = u->dim / 2;
    for (int r = begin; r < end; r += 2) {
        v16 sums[BLOCK_ROWS];
        for (int i = 0; i < rows; i++) sums[i] = v_set1(0.0f);
        const float *first = (const float *)u->k_runs[r], *second = (const float *)u->k_runs[r + 1];
        for (int step = 0; step < u->steps; step += LANES) {
            v16 keys[LANES];
#pragma GCC unroll 8
            for (int i = 0; i < RUN; i++) {
                keys[i] = v_load(first + i * token_steps + step);
                keys[i + RUN] = v_load(second + i * token_steps + step);
            }
            v_transpose(keys);
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++) {
                if (j % 4 == 0) read_ahead(u, 2); /* in total as many lines as this function reads */
                for (int i = 0; i < rows; i++) sums[i] = dot(v_set1(q[i * u->steps + step + j]), keys[j], sums[i]);
            }
        }
        for (int i = 0; i < rows; i++) v_store(u->scratch->scores + i * TILE + r * RUN, sums[i]);
    }
}

/* Load pairs of two tokens' elements; `vectors` is even. */
FN void page_values(v16 *value, const uint16_t *token, int64_t dim, int vectors) {
    const __m512i low = FIRST_PAIRS, high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int j = 0; j < vectors; j += 2) {
        __m512i even = _mm512_loadu_si512(token + j * LANES), odd = _mm512_loadu_si512(token + dim + j * LANES);
        value[j] = (v16)_mm512_permutex2var_epi16(even, low, odd);
        value[j + 1] = (v16)_mm512_permutex2var_epi16(even, high, odd);
    }
}
#else
/* Compute the scores of all rows, 16 keys at a time: the packed keys stay in the L1 cache. */
FN void score_pages(int rows, struct unit *u, int begin, int end) {
    for (int r = begin; r < end; r += 2) {
        read_ahead(u, run_lines(u));
        pack_key_vector(u, r, u->k);
        score_block(rows, 1, u->scratch->q, u->k, u->steps, u->scratch->scores + r * RUN);
    }
}

FN void page_values(v16 *value, const uint16_t *token, int64_t dim, int vectors) {
    (void)dim;
    for (int j = 0; j < vectors; j++) value[j] = v_load_elements(token + j * LANES, BFLOAT16, LANES);
}
#endif

/* Like mix_block, for values of some runs that are read in place. The factors are applied with the first run. */
FN void mix_pages(int rows, int vectors, struct unit *u, int begin, int end, int is_first, float *all_mixed, int column) {
    const float *weights = u->scratch->scores, *factors = u->scratch->factors;
    float *mixed = all_mixed + column;
    v16 sums[BLOCK_ROWS][4];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) {
            sums[i][j] = v_load(mixed + i * u->padded + j * LANES);
            if (is_first) sums[i][j] = v_mul(sums[i][j], v_set1(factors[i]));
        }
    for (int r = begin; r < end; r++) {
        const int lines = run_lines(u) * vectors * LANES / u->dim / 2;
        if (!DOT_BF16) read_ahead(u, lines);
        const uint16_t *token = (const uint16_t *)u->v_runs[r] + column;
        for (int step = 0; step < RUN_STEPS; step++, token += RUN / RUN_STEPS * u->dim) {
            v16 value[4];
            if (DOT_BF16) read_ahead(u, lines / RUN_STEPS);
            page_values(value, token, u->dim, vectors);
            for (int i = 0; i < rows; i++) {
                v16 weight = v_set1(weights[i * TILE + r * RUN_STEPS + step]);
                for (int j = 0; j < vectors; j++) sums[i][j] = dot(weight, value[j], sums[i][j]);
            }
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) v_store(mixed + i * u->padded + j * LANES, sums[i][j]);
}

/* Call the functions above with constant numbers of rows, so that the compiler keeps the sums in registers. */
#define CASE(n, call) \
    case n: \
        if (n <= BLOCK_ROWS) call(n); \
        break;
#define WITH_CONSTANT_ROWS(rows, call) \
    switch (rows) { CASE(1, call) CASE(2, call) CASE(3, call) CASE(4, call) CASE(5, call) CASE(6, call) }

/* Compute scores for a few keys at a time and all rows, while the keys are in the L1 cache. */
FN void score_tile(struct unit *u, const struct row_block *blocks) {
    const int vectors = MAX_VECTORS, width = vectors * LANES;
    for (int first = u->runs_begin * RUN / width * width; first < u->runs_end * RUN; first += width) {
        for (const struct row_block *b = blocks; b < blocks + u->blocks; b++) {
            int key = first > b->begin ? first : b->begin, end = first + width < b->end ? first + width : b->end;
            const float *q = u->scratch->q + (int64_t)b->row * u->steps;
            float *scores = u->scratch->scores + b->row * TILE;
            if (vectors > 1 && end - key == width) {
#define CALL(n) score_block(n, vectors, q, u->k + (int64_t)key * u->steps, u->steps, scores + key)
                WITH_CONSTANT_ROWS(b->rows, CALL)
#undef CALL
                continue;
            }
            for (; key < end; key += LANES) {
#define CALL(n) score_block(n, 1, q, u->k + (int64_t)key * u->steps, u->steps, scores + key)
                WITH_CONSTANT_ROWS(b->rows, CALL)
#undef CALL
            }
        }
    }
}

/* Add the weighted values for a few columns at a time and all rows. */
FN void mix_tile(struct unit *u, const struct row_block *blocks, float *mixed) {
    for (int column = 0, width; column < u->padded; column += width) {
        const int vectors = column + MAX_VECTORS * LANES <= u->padded ? MAX_VECTORS : 1;
        width = vectors * LANES;
        for (const struct row_block *b = blocks; b < blocks + u->blocks; b++) {
            if (vectors > 1) {
#define CALL(n) mix_block(n, MAX_VECTORS, u, b, mixed, column)
                WITH_CONSTANT_ROWS(b->rows, CALL)
#undef CALL
            } else {
#define CALL(n) mix_block(n, 1, u, b, mixed, column)
                WITH_CONSTANT_ROWS(b->rows, CALL)
#undef CALL
            }
        }
    }
}

/* End of the piece that begins with `run`. */
FN int piece_end(const struct unit *u, int run, int end) {
    const int next = (run / u->piece_runs + 1) * u->piece_runs;
    return next < end ? next : end;
}

/* Process a tile with keys and values that are read in place, for one block of rows. The heads of the item take turns after each piece. */
FN void attend_pages(struct unit *u, int64_t tile_begin, int64_t low, int64_t high, const struct row_block *block, enum state number) {
    for (int begin = u->runs_begin, end; begin < u->runs_end; begin = end) {
        end = u->heads > 1 ? piece_end(u, begin, u->runs_end) : u->runs_end;
        for (int h = 0; h < u->heads; h++) {
            show_head(u, h, begin, end);
#define CALL(n) score_pages(n, u, begin, end)
            WITH_CONSTANT_ROWS(u->rows, CALL)
#undef CALL
            end_piece(u, begin, end);
        }
    }
    for (int h = 0; h < u->heads; h++) {
        show_head(u, h, 0, 0);
        struct row_state state = state_of(u, number);
        soften(u, tile_begin, block, 1, &state);
    }
    for (int begin = u->runs_begin, end; begin < u->runs_end; begin = end) {
        end = u->heads > 1 ? piece_end(u, begin, u->runs_end) : u->runs_end;
        for (int h = 0; h < u->heads; h++) {
            show_head(u, h, begin, end);
            copy_edges(u, tile_begin, low, high, begin, end);
            const struct row_state state = state_of(u, number);
            for (int column = 0; column < u->padded; column += PAGE_VECTORS(u->rows) * LANES) {
#define CALL(n) mix_pages(n, PAGE_VECTORS(n), u, begin, end, begin == u->runs_begin, state.mixed, column)
                WITH_CONSTANT_ROWS(u->rows, CALL)
#undef CALL
            }
            end_piece(u, begin, end);
        }
    }
}

SHARED void attend_tiles(struct unit *u, int64_t begin, int64_t end, enum state number) {
    struct row_block blocks[MAX_BLOCKS];
    u->k = u->scratch->k;
    u->v = u->scratch->v;
    for (int64_t tile = begin / TILE * TILE; tile < end; tile += TILE) {
        int64_t low = tile > begin ? tile : begin, high = tile + TILE < end ? tile + TILE : end;
        begin_tile(u, tile, low, high, blocks);
        if (pages_stay(u)) {
            attend_pages(u, tile, low, high, blocks, number);
            continue;
        }
        struct row_state state = state_of(u, number);
        pack_tile(u, tile, low, high);
        score_tile(u, blocks);
        soften(u, tile, blocks, u->blocks, &state);
        mix_tile(u, blocks, state.mixed);
    }
}
