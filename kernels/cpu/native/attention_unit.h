/* A thread's work unit: where its pages lie, and how they are read ahead of the work. Included by attention_tile.h.
 *
 * A page holds one KV head's tokens of a block, and the heads' pages of a block lie side by side:
 *
 *     block 7    | K of head 0 | head 1 | ... | head 7 | V of head 0 | head 1 | ... | head 7 |
 *
 * Where a unit takes its pages as they lie (`pages_stay`), an item has several heads, and all that they need of a block is one
 * contiguous piece of keys, later one of values. A piece of 8 KiB, which is one head's, comes at 19 to 23 GB/s from
 * random blocks where one of 64 KiB comes at 30 (Zen 4, two threads).
 */

enum { RUNS = TILE / RUN, MAX_BLOCKS = (MAX_ROWS + BLOCK_ROWS - 1) / BLOCK_ROWS };

/* A work unit and some KV heads, which a thread takes, or a branch of one; no tile: none. */
struct item {
    const struct work_unit *work;
    const struct query_tile *tile;
    int64_t head, begin, end;      /* the first KV head; keys */
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

/* The same where an item has several heads: lines in exactly the order in which they are used. */
struct read_piece {
    const struct query_tile *tile; /* of the item that is read */
    int64_t head, end;
    int64_t tile_begin, tile_end;  /* keys of the tile that is read */
    int64_t position;              /* the first of its keys that is in no piece yet */
    const char *cache;             /* that is read: the keys', then the values' */
    int64_t runs[RUNS];            /* of the piece: bytes from the begin of either cache to the first head's */
    int num_runs, run, heads_left; /* of the piece: in all; whose lines come next */
    const char *line, *line_end;   /* what is left to ask of that run */
    int64_t asked, used;           /* lines of this thread */
};

struct unit {
    const struct attention_call *call;
    const struct scratch *views, *scratch; /* of each head of an item, LANES rows apart; of the head that is shown */
    struct read_ahead ahead;
    struct read_piece piece;
    const struct query_tile *tile;
    int64_t first_head, head;           /* of the KV heads: of the item, and shown */
    int heads;                          /* of an item */
    int group, rows;                    /* query heads of a KV head; rows = tokens * group */
    int blocks;                         /* of BLOCK_ROWS rows */
    int dim, padded;                    /* elements of a head; rounded up to LANES */
    int dtype, element_bytes;
    int steps;                          /* of a product over head_dim: elements, or pairs of them */
    int piece_runs;                     /* of a block and a tile, an even number: what heads read by turns */
    int runs_begin, runs_end;           /* of the tile, that hold a key */
    int64_t offsets[RUNS];              /* bytes from the begin of either cache to the first head's run; -1: not there */
    const char *k_runs[RUNS], *v_runs[RUNS]; /* of the head that is shown */
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

/* Find the tile's runs. Those of a vector of 16 keys that has any are all there: zeros where no key is seen. */
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

/* The keys that are asked for next are those of the next item. */
FN void read_next_item(struct unit *u) {
    struct read_ahead *a = &u->ahead;
    a->position = a->next.begin / RUN * RUN;
    a->end = a->next.end;
    a->at = run_cursor_at(u, a->next.tile->row, a->next.head, a->position);
    a->next.tile = NULL;
}

/* Ask for some lines of keys, for twice as many while it has to catch up. */
FN void read_keys_ahead(struct unit *u, int lines) {
    struct read_ahead *a = &u->ahead;
    if (a->keys + 2 < a->used + READ_AHEAD) lines *= 2;
    for (; lines > 0; lines--, a->key_line += CACHE_LINE) {
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
            a->key_end = a->key_line + run_lines(u) * CACHE_LINE;
        }
        __builtin_prefetch(a->key_line, 0, AHEAD_LEVEL);
    }
}

/* The same of the values to those keys. */
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

/* Lines that are asked for and not used yet: 256 took a twentieth longer, 2,048 too. To the second-level cache: the first one has fewer
 * on their way at a time, half the speed (Zen 4, all builds). */
enum { PIECE_AHEAD = 512 };

/* What comes next is the item's tile from `position` on, in one of the caches; nothing where the item ends there. */
FN void read_tile(struct read_piece *p, const char *cache, int64_t position) {
    p->cache = cache;
    p->position = p->tile_begin = position;
    p->tile_end = (position / TILE + 1) * TILE < p->end ? (position / TILE + 1) * TILE : p->end;
}

/* The lines that are asked for next are the first of the next item's. */
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

/* The next piece of what the thread will read; 0 where there is none. */
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

/* The next lines that lie together; 0 where there are none. */
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

/* Ask for some of the lines that come next, for twice as many while it has to catch up. */
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

/* The runs of a piece have been read, of one head. */
FN void end_piece(struct unit *u, int begin, int end) {
    for (int r = begin; r < end; r++)
        if (u->offsets[r] >= 0) u->piece.used += run_lines(u);
}

/* Where the processor reads what comes next during all of its work, a few lines at a time: of keys and of values each. */
FN void read_ahead(struct unit *u, int lines) {
    if (u->heads > 1) {
        read_pieces_ahead(u, 2 * lines);
    } else {
        read_keys_ahead(u, lines);
        read_values_ahead(u, lines);
    }
}
