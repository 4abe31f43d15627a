/* What a routing decision does for each block of its prompt: its hash, and the bucket that has it.

   One thread, no allocation, and the caller keeps the interpreter's lock: a prompt of 16,000 tokens takes some tens of
   microseconds. Layouts are those of `quire/router/block_table.py`, the hash is that of `RoutingHasher` in
   `quire/protos/wire.py`; both have the same in numpy. */
#include <stdint.h>

#include "clones.h"

#define QUIRE_ROUTER_ABI 2

enum {
    BLOCK_TOKENS = 64, /* wire.ROUTING_BLOCK_TOKENS */
    PLACES = 8,        /* entries of a bucket: a cache line of keys */
    AHEAD = 16,        /* lookups whose cache lines are on their way: more than a core has misses in flight */
};

int64_t quire_router_abi(void) { return QUIRE_ROUTER_ABI; }

/* SplitMix64's finaliser, with its increment. */
static uint64_t splitmix64(uint64_t x) {
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

/* hashes[i] of the first 64 (i + 1) tokens; tokens [64 blocks] non-negative, weights [64 blocks], and their sums over
   each block, [blocks]. No vector unit below AVX-512 multiplies 64 bits, but all multiply 32 by 32: with w = 2^32 h + l

       sum w (t + 1) = sum w + sum l t + 2^32 sum h t      modulo 2^64 */
CLONES void quire_prefix_hashes(const int32_t *tokens, const uint64_t *weights, const uint64_t *weight_sums,
                                int64_t blocks, uint64_t chain_seed, uint64_t *hashes) {
    uint64_t sum = 0;
    for (int64_t block = 0; block < blocks; block++) {
        const int32_t *t = tokens + BLOCK_TOKENS * block;
        const uint64_t *w = weights + BLOCK_TOKENS * block;
        uint64_t low = 0, high = 0;
        for (int64_t i = 0; i < BLOCK_TOKENS; i++) {
            low += (w[i] & UINT32_MAX) * (uint32_t)t[i];
            high += (w[i] >> 32) * (uint32_t)t[i];
        }
        sum += weight_sums[block] + low + (high << 32);
        hashes[block] = splitmix64(sum ^ chain_seed);
    }
}

/* Mirrored in `quire/router/native_library.py`. */
struct block_table {
    const uint64_t *keys;       /* [buckets, PLACES]; 0: an empty place */
    const int32_t *ids;         /* [buckets, PLACES] */
    const uint8_t *has_spilled; /* [buckets] */
    uint64_t num_buckets;
    uint64_t low, high; /* masks of a bucket's number: the second, or the first if there is no such bucket yet */
};

static uint64_t bucket_of(const struct block_table *table, uint64_t hash) {
    uint64_t bucket = hash & table->high;
    return bucket < table->num_buckets ? bucket : hash & table->low;
}

/* A look-up is two cache misses and little else, so they are begun long before. */
static void begin_look_up(const struct block_table *table, uint64_t hash) {
    uint64_t start = PLACES * bucket_of(table, hash);
    __builtin_prefetch(table->keys + start);
    __builtin_prefetch(table->ids + start);
}

enum { ABSENT = -1, SUSPECT = -2 }; /* the latter may have been spilled */

/* The place of a hash, or one of the above. */
static int64_t look_up(const struct block_table *table, uint64_t hash) {
    uint64_t bucket = bucket_of(table, hash), found = PLACES;
    const uint64_t *keys = table->keys + PLACES * bucket;
    for (uint64_t k = 0; k < PLACES; k++) found = keys[k] == hash ? k : found;
    if (found < PLACES && hash) return (int64_t)(PLACES * bucket + found); /* a hash of 0 is never in its bucket */
    return table->has_spilled[bucket] ? SUSPECT : ABSENT;
}

/* ids, places [n]: 0 and a place of no meaning for what is not in its bucket. The suspects' indices go to `suspects`,
   [n], and how many there are is returned. */
int64_t quire_find_blocks(const struct block_table *table, const uint64_t *hashes, int64_t n, int32_t *ids,
                          int64_t *places, int32_t *suspects) {
    int64_t num_suspects = 0;
    for (int64_t i = -AHEAD; i < n; i++) {
        if (i + AHEAD < n) begin_look_up(table, hashes[i + AHEAD]);
        if (i < 0) continue;
        int64_t place = look_up(table, hashes[i]);
        places[i] = place;
        ids[i] = place >= 0 ? table->ids[place] : 0;
        if (place == SUSPECT) suspects[num_suspects++] = (int32_t)i;
    }
    return num_suspects;
}

/* Neighbours of one id are a run: where each begins and its id, 0 for what is not in its bucket, to `starts` and `ids`,
   [n]. A suspect is a run of its own; which they are goes to `suspects`, [n]. Returns the runs, and in the upper half
   the suspects. */
int64_t quire_find_runs(const struct block_table *table, const uint64_t *hashes, int64_t n, int32_t *starts,
                        int32_t *ids, int32_t *suspects) {
    int64_t num_runs = 0, num_suspects = 0;
    int32_t last = -1;
    for (int64_t i = -AHEAD; i < n; i++) {
        if (i + AHEAD < n) begin_look_up(table, hashes[i + AHEAD]);
        if (i < 0) continue;
        int64_t place = look_up(table, hashes[i]);
        int32_t id = place >= 0 ? table->ids[place] : 0;
        if (id == last && place != SUSPECT) continue;
        if (place == SUSPECT) suspects[num_suspects++] = (int32_t)num_runs;
        starts[num_runs] = (int32_t)i;
        ids[num_runs++] = id;
        last = place == SUSPECT ? -1 : id;
    }
    return num_runs | num_suspects << 32;
}
