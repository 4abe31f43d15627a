/* The products of low-rank adapters. Included once for each instruction set, after row_part.h.
 *
 *     down   inner[row, r] = sum over i of x[row, i] down[r, i]        each of 16 lanes adds up its columns in order, then the lanes
 *     up     out[row, j] += scale * sum over r of inner[row, r] up[r, j]     in order of r, rounded once
 *
 * All arithmetic is float32. A row's result depends on that row and its adapter alone, so its bits do not depend on the other rows.
 *
 * Bytes: a piece reads its adapter once, and x and `out` once from memory. Flops: 2 rank (depth + columns) for each row.
 *
 * The including file defines ADAPTER_ROWS, the rows whose sums fit the registers.
 */

/* inner[row + i, first + r] for i < rows and r < RANK_BLOCK; `rows` is a constant. */
FN void down_tile(const struct adapter_call *c, const struct adapter_part *part, int64_t q, int64_t row, int64_t first, int rows, int dtype) {
    const int64_t bytes = dtype == FLOAT32 ? 4 : 2, width = (c->depth + LANES - 1) / LANES * LANES;
    const int64_t ranks = part->rank - first < RANK_BLOCK ? part->rank - first : RANK_BLOCK;
    v16 sums[ADAPTER_ROWS][RANK_BLOCK];
    const char *down[RANK_BLOCK];
    for (int r = 0; r < RANK_BLOCK; r++) down[r] = part->down + (first + (r < ranks ? r : 0)) * width * bytes;
    for (int i = 0; i < rows; i++)
        for (int r = 0; r < RANK_BLOCK; r++) sums[i][r] = v_set1(0.0f);
    for (int64_t k = 0; k < c->depth; k += LANES) {
        v16 weights[RANK_BLOCK];
        for (int r = 0; r < RANK_BLOCK; r++) weights[r] = v_load_elements(down[r] + k * bytes, dtype, LANES);
        for (int i = 0; i < rows; i++) {
            v16 x = load_part(c->x + (row + i) * c->x_stride, k, c->depth, dtype);
            for (int r = 0; r < RANK_BLOCK; r++) sums[i][r] = v_fma(x, weights[r], sums[i][r]);
        }
    }
    for (int i = 0; i < rows; i++) {
        float *inner = c->step->inner + ((row + i) * ADAPTER_PARTS + q) * ADAPTER_RANK + first;
        for (int64_t r = 0; r < ranks; r++) inner[r] = v_sum(sums[i][r]);
    }
}

/* A panel of `up` for rows [row, row + rows); `rows` is a constant. */
FN void up_tile(const struct adapter_call *c, const struct adapter_part *part, int64_t q, int64_t row, int64_t panel, int64_t before, int rows, int dtype) {
    enum { WIDTH = ADAPTER_COLUMNS / LANES };
    const int64_t bytes = dtype == FLOAT32 ? 4 : 2;
    const char *up = part->up + panel * part->rank * ADAPTER_COLUMNS * bytes;
    v16 sums[ADAPTER_ROWS][WIDTH];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < WIDTH; j++) sums[i][j] = v_set1(0.0f);
    for (int64_t r = 0; r < part->rank; r++, up += ADAPTER_COLUMNS * bytes) {
        v16 weights[WIDTH];
        for (int j = 0; j < WIDTH; j++) weights[j] = v_load_elements(up + j * LANES * bytes, dtype, LANES);
        for (int i = 0; i < rows; i++) {
            v16 inner = v_set1(c->step->inner[((row + i) * ADAPTER_PARTS + q) * ADAPTER_RANK + r]);
            for (int j = 0; j < WIDTH; j++) sums[i][j] = v_fma(inner, weights[j], sums[i][j]);
        }
    }
    const v16 scale = v_set1(part->scale);
    for (int i = 0; i < rows; i++) {
        char *out = c->out + (row + i) * c->out_stride + before * bytes;
        for (int j = 0; j < WIDTH; j++) {
            int64_t column = panel * ADAPTER_COLUMNS + j * LANES;
            if (column >= c->columns[q]) break;
            store_part(out, column, c->columns[q], dtype, v_fma(scale, sums[i][j], load_part(out, column, c->columns[q], dtype)));
        }
    }
}

#define IN_TILES(tile, ...) \
    for (; row + ADAPTER_ROWS <= piece->end; row += ADAPTER_ROWS) tile(__VA_ARGS__, ADAPTER_ROWS, dtype); \
    for (; row < piece->end; row++) tile(__VA_ARGS__, 1, dtype);

FN void down_unit(const struct adapter_call *c, int64_t unit, int dtype) {
    const int64_t blocks = adapter_rank_blocks(c), first = unit % blocks * RANK_BLOCK, q = unit / blocks % c->num_parts;
    const struct adapter_piece *piece = c->step->pieces + unit / blocks / c->num_parts;
    const struct adapter_part *part = c->parts + piece->slot * c->num_parts + q;
    if (first >= part->rank) return;
    int64_t row = piece->begin;
    IN_TILES(down_tile, c, part, q, row, first)
}

FN void up_unit(const struct adapter_call *c, int64_t unit, int64_t panels, int dtype) {
    const struct adapter_piece *piece = c->step->pieces + unit / panels;
    int64_t panel = unit % panels, q = 0, before = 0;
    while (panel >= adapter_panels(c->columns[q])) {
        panel -= adapter_panels(c->columns[q]);
        before += c->columns[q++];
    }
    const struct adapter_part *part = c->parts + piece->slot * c->num_parts + q;
    if (!part->rank) return;
    int64_t row = piece->begin;
    IN_TILES(up_tile, c, part, q, row, panel, before)
}

TARGETED int64_t NAME(adapter_down)(void *argument) {
    struct adapter_call *c = argument;
    struct member member = team_join(c->team);
    int64_t done = 0;
    for (int64_t unit; (unit = team_take(c->team, &member)) >= 0; done++) {
        if (c->dtype == FLOAT32) down_unit(c, unit, FLOAT32);
        if (c->dtype == FLOAT16) down_unit(c, unit, FLOAT16);
        if (c->dtype == BFLOAT16) down_unit(c, unit, BFLOAT16);
    }
    return done;
}

TARGETED int64_t NAME(adapter_up)(void *argument) {
    struct adapter_call *c = argument;
    struct member member = team_join(c->team);
    int64_t done = 0, panels = 0;
    for (int64_t part = 0; part < c->num_parts; part++) panels += adapter_panels(c->columns[part]);
    for (int64_t unit; (unit = team_take(c->team, &member)) >= 0; done++) {
        if (c->dtype == FLOAT32) up_unit(c, unit, panels, FLOAT32);
        if (c->dtype == FLOAT16) up_unit(c, unit, panels, FLOAT16);
        if (c->dtype == BFLOAT16) up_unit(c, unit, panels, BFLOAT16);
    }
    return done;
}
