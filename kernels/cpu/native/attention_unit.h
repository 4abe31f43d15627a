/* The work unit of a thread: the addresses of its pages, and the prefetches ahead of the work. Included by attention_tile.h.
 *
 * A page has one KV head's tokens of a block. The pages of a block's heads are contiguous:
 *
 *     block 7    | K of head 0 | head 1 | ... | head 7 | V of head 0 | head 1 | ... | head 7 |
 *
 * If a unit reads its pages in place (`pages_stay`), an item has several heads, and their part of a block is one contiguous piece of
 * keys, later one of values. Pieces of 64 KiB in random blocks are read at 30 GB/s, pieces of 8 KiB, which is one head, at 19 to 23 GB/s
 * (Zen 4, two threads).
 */

enum { RUNS = TILE / RUN, MAX_BLOCKS = (MAX_ROWS + BLOCK_ROWS - 1) / BLOCK_ROWS };

/* What a thread takes at a time: a work unit, or a branch of one, and some KV heads. `tile` is NULL for no item. */
struct item {
    const struct work_unit *work;
    const struct query_tile *tile;
    int64_t head, begin, end;      /* first KV head; keys */
    int64_t branches;              /* branches that follow the item */
};

/* Iterates over the addresses of runs of 8 tokens: one division for each item instead of one for each run. */
struct run_cursor {
    const int64_t *table;          /* block table of the row */
    int64_t block, within;         /* position / block_size, position % block_size */
    int64_t head_elements;         /* elements from the start of a block to the head */
};

/* Prefetches of an item with one head. With every step of the work a few lines of keys and of values are prefetched, some runs ahead, and
 * near the end of an item those of the next one. So memory is always busy, although the order of the runs is unknown to hardware
 * prefetchers. When all lines were prefetched at once before 16 keys were scored, or the values of 8 keys were mixed, the times of work and
 * memory added up: a step of 16 to 30 rows took 1.2 to 1.5 times as long (Zen 5, all builds). */
enum { READ_AHEAD = 16, READ_RING = 64 };
struct read_ahead {
    struct item next;              /* the item after the one being prefetched; its tile is NULL once its own prefetches have begun */
    struct run_cursor at;
    int64_t position, end;         /* keys of the item being prefetched */
    int64_t tile, used;            /* runs that this thread has used before this tile, and including it */
    int64_t keys, values;          /* runs of which keys, values have been prefetched or used */
    const char *key_line, *key_end, *value_line, *value_end; /* lines of the current run that are not prefetched yet */
    int64_t runs[READ_RING];       /* offsets in bytes in either cache of the last `keys` runs */
};

/* Prefetches of an item with several heads: lines in exactly the order in which they are used. */
struct read_piece {
    const struct query_tile *tile; /* tile of the item being prefetched */
    int64_t head, end;
    int64_t tile_begin, tile_end;  /* keys of the tile being prefetched */
    int64_t position;              /* first key of the tile that is not in a piece yet */
    const char *cache;             /* cache being prefetched: the keys', then the values' */
    int64_t runs[RUNS];            /* offsets in bytes of the piece's runs, of the first head, in either cache */
    int num_runs, run, heads_left; /* of the piece: number of runs; next run; heads not prefetched yet */
    const char *line, *line_end;   /* lines of the current run that are not prefetched yet */
    int64_t asked, used;           /* lines that this thread has prefetched and used */
};

struct unit {
    const struct attention_call *call;
    const struct scratch *views, *scratch; /* memory of each head of the item, LANES rows apart; of the current head */
    struct read_ahead ahead;
    struct read_piece piece;
    const struct query_tile *tile;
    int64_t first_head, head;           /* KV heads: the item's first, the current one */
    int heads;                          /* KV heads of the item */
    int group, rows;                    /* query heads of a KV head; rows = tokens * group */
    int blocks;                         /* blocks of BLOCK_ROWS rows */
    int dim, padded;                    /* elements of a head; rounded up to LANES */
    int dtype, element_bytes;
    int steps;                          /* steps of a product over head_dim: elements, or pairs of elements */
    int piece_runs;                     /* runs of a piece, an even number, in one block and one tile: heads take turns after each piece */
    int runs_begin, runs_end;           /* runs of the tile that have a key */
    int64_t offsets[RUNS];              /* offsets in bytes of the runs, of the first head, in either cache; -1: no key is seen */
    const char *k_runs[RUNS], *v_runs[RUNS]; /* runs of the current head */
    float *k, *v;                       /* the tile's packed keys and values */
};

FN struct run_cursor run_cursor_at(const struct unit *u, int64_t row, int64_t head, int64_t position) {
    const struct attention_call *c = u->call;
    return (struct run_cursor){c->plan.block_tables + row * c->plan.table_stride, position / c->block_size, position % c->block_size,
                               head * c->block_size * c->head_dim};
}

/* Return the offset in bytes of the cursor's run in a cache, and advance the cursor. */
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

FN int64_t run_bytes(const struct unit *u) { return (int64_t)RUN * u->dim * u->element_bytes; }

FN int run_lines(const struct unit *u) { return (int)(run_bytes(u) / CACHE_LINE); }

/* From a head's page to the next one's. */
FN int64_t page_bytes(const struct unit *u) { return u->call->block_size * u->dim * u->element_bytes; }

/* Let one of the item's heads be the one that is worked on, with its runs of the tile from `begin` to `end`. */
FN void show_head(struct unit *u, int number, int begin, int end) {
    u->scratch = &u->views[number];
    u->head = u->first_head + number;
    for (int r = begin; r < end; r++) {
        const int is_there = u->offsets[r] >= 0;
        const int64_t offset = u->offsets[r] + number * page_bytes(u);
        u->k_runs[r] = is_there ? (const char *)u->call->k + offset : (const char *)u->scratch->zeros;
        u->v_runs[r] = is_there ? (const char *)u->call->v + offset : (const char *)u->scratch->zeros;
    }
}

/* Find the tile's runs. If one run of a vector of 16 keys has keys, the other one gets zeros. */
FN void locate_runs(struct unit *u, int64_t tile_begin, int64_t begin, int64_t end) {
    u->runs_begin = (begin - tile_begin) / LANES * 2;
    u->runs_end = (end - tile_begin + LANES - 1) / LANES * 2;
    u->ahead.tile = u->ahead.used;
    struct run_cursor at = run_cursor_at(u, u->tile->row, u->first_head, begin / RUN * RUN);
    for (int r = u->runs_begin; r < u->runs_end; r++) {
        int64_t first = tile_begin + r * RUN;
        u->offsets[r] = -1;
        if (first + RUN <= begin || first >= end) continue;
        u->offsets[r] = next_run(u, &at);
        u->ahead.used++;
    }
    show_head(u, 0, u->runs_begin, u->runs_end);
}

/* ---------------------------------------------------------------------------------------------- one head */

/* Continue the prefetches with the next item. */
FN void read_next_item(struct unit *u) {
    struct read_ahead *a = &u->ahead;
    a->position = a->next.begin / RUN * RUN;
    a->end = a->next.end;
    a->at = run_cursor_at(u, a->next.tile->row, a->next.head, a->position);
    a->next.tile = NULL;
}

/* Prefetch some lines of keys, twice as many while the prefetches are behind. */
FN void read_keys_ahead(struct unit *u, int lines) {
    struct read_ahead *a = &u->ahead;
    if (a->keys + 2 < a->used + READ_AHEAD) lines *= 2;
    for (; lines > 0; lines--, a->key_line += CACHE_LINE) {
        if (a->key_line == a->key_end) {
            do {
                if (a->keys == a->used + READ_AHEAD) return;
                while (a->position >= a->end) { /* a loop, because the next item may have no keys */
                    if (!a->next.tile) return;
                    read_next_item(u);
                }
                a->runs[a->keys++ % READ_RING] = next_run(u, &a->at);
                a->position += RUN;
            } while (a->keys <= a->used);
            a->key_line = (const char *)u->call->k + a->runs[(a->keys - 1) % READ_RING];
            a->key_end = a->key_line + run_lines(u) * CACHE_LINE;
        }
        __builtin_prefetch(a->key_line, 0, AHEAD_LEVEL);
    }
}

/* Prefetch some lines of the values that belong to the prefetched keys. */
FN void read_values_ahead(struct unit *u, int lines) {
    struct read_ahead *a = &u->ahead;
    if (a->values + 2 < a->keys) lines *= 2;
    for (; lines > 0; lines--, a->value_line += CACHE_LINE) {
        if (a->value_line == a->value_end) {
            if (a->values < a->tile) a->values = a->tile;
            if (a->values >= a->keys) return;
            a->value_line = (const char *)u->call->v + a->runs[a->values++ % READ_RING];
            a->value_end = a->value_line + run_lines(u) * CACHE_LINE;
        }
        __builtin_prefetch(a->value_line, 0, AHEAD_LEVEL);
    }
}

/* ---------------------------------------------------------------------------------------------- several heads */

/* Most lines that are prefetched and not used yet: with 256, and with 2,048, the work took 5% longer. The prefetches go to the second-level
 * cache, because the L1 cache can have fewer outstanding, which halves the speed (Zen 4, all builds). */
enum { PIECE_AHEAD = 512 };

/* Continue with the tile of the item at `position`, in one of the caches; an empty range if the item ends there. */
FN void read_tile(struct read_piece *p, const char *cache, int64_t position) {
    p->cache = cache;
    p->position = p->tile_begin = position;
    p->tile_end = (position / TILE + 1) * TILE < p->end ? (position / TILE + 1) * TILE : p->end;
}

/* Continue the prefetches with the next item. */
FN void read_next_pieces(struct unit *u) {
    struct read_piece *p = &u->piece;
    struct item *next = &u->ahead.next;
    p->tile = next->tile;
    p->head = next->head;
    p->end = next->end;
    read_tile(p, u->call->k, next->begin);
    p->num_runs = p->run = p->heads_left = 0;
    p->line = p->line_end = NULL;
    next->tile = NULL;
}

/* Advance to the next piece that the thread will read; returns 0 if there is none. */
FN int next_piece(struct unit *u) {
    const struct attention_call *c = u->call;
    struct read_piece *p = &u->piece;
    while (p->position >= p->tile_end) {
        if (p->tile_begin < p->tile_end && p->cache == (const char *)c->k) {
            read_tile(p, c->v, p->tile_begin);
        } else if (p->tile_end < p->end) {
            read_tile(p, c->k, p->tile_end);
        } else {
            if (!u->ahead.next.tile) return 0;
            read_next_pieces(u);
        }
    }
    struct run_cursor at = run_cursor_at(u, p->tile->row, p->head, p->position / RUN * RUN);
    const int first = (int)(p->position % TILE) / RUN;
    const int64_t end = p->position / TILE * TILE + (first / u->piece_runs + 1) * u->piece_runs * RUN;
    p->num_runs = p->run = 0;
    for (p->position = p->position / RUN * RUN; p->position < end && p->position < p->tile_end; p->position += RUN)
        p->runs[p->num_runs++] = next_run(u, &at);
    p->heads_left = u->heads;
    return 1;
}

/* Advance to the next contiguous lines; returns 0 if there are none. */
SHARED int next_lines(struct unit *u) {
    struct read_piece *p = &u->piece;
    if (p->run == p->num_runs) {
        p->run = 0;
        p->heads_left--;
    }
    if (p->heads_left <= 0 && !next_piece(u)) return 0;
    const int first = p->run++;
    while (p->run < p->num_runs && p->runs[p->run] == p->runs[p->run - 1] + run_bytes(u)) p->run++;
    p->line = p->cache + p->runs[first] + (u->heads - p->heads_left) * page_bytes(u);
    p->line_end = p->line + (p->run - first) * run_bytes(u);
    return 1;
}

/* Prefetch some of the next lines, twice as many while the prefetches are behind. */
FN void read_pieces_ahead(struct unit *u, int lines) {
    struct read_piece *p = &u->piece;
    const int64_t missing = p->used + PIECE_AHEAD - p->asked;
    if (missing > PIECE_AHEAD / 4) lines *= 2;
    if (lines > missing) lines = (int)missing;
    while (lines > 0) {
        if (p->line == p->line_end && !next_lines(u)) return;
        const int64_t together = (p->line_end - p->line) / CACHE_LINE, count = together < lines ? together : lines;
        for (int64_t i = 0; i < count; i++) __builtin_prefetch(p->line + i * CACHE_LINE, 0, 2);
        p->line += count * CACHE_LINE;
        p->asked += count;
        lines -= (int)count;
    }
}

/* Count the lines of a piece as used, for one head. */
FN void end_piece(struct unit *u, int begin, int end) {
    for (int r = begin; r < end; r++)
        if (u->offsets[r] >= 0) u->piece.used += run_lines(u);
}

/* Prefetch `lines` lines of keys and as many of values; called throughout the work, for a few lines at a time. */
FN void read_ahead(struct unit *u, int lines) {
    if (u->heads > 1) {
        read_pieces_ahead(u, 2 * lines);
    } else {
        read_keys_ahead(u, lines);
        read_values_ahead(u, lines);
    }
}
