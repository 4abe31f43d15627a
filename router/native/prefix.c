/* The part of a routing decision that runs for each block of the prompt: compute its hash, look it up in the table, and
   match its holders (the replicas that have the block).

   The code runs in one thread, allocates nothing, and its caller keeps the GIL: a prompt of 16,000 tokens takes some
   tens of microseconds. `quire/router/index/block_table.py` describes the layouts and has the look-up in numpy,
   `RoutingHasher` in `quire/protos/routing_hash.py` has the hash in numpy, `PrefixIndex` has the match in Python. */
#include <stdint.h>

#define QUIRE_ROUTER_ABI 5

enum {
    BLOCK_TOKENS = 64, /* ROUTING_BLOCK_TOKENS of `quire/protos/routing_hash.py` */
    AHEAD = 16,        /* look-ups with a prefetch in progress: more than the misses a CPU core has in flight */
};

int64_t quire_router_abi(void) { return QUIRE_ROUTER_ABI; }

/* SplitMix64's finaliser, with its increment. */
static uint64_t splitmix64(uint64_t x) {
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

/* Compute hashes[i], the hash of the first 64 (i + 1) tokens, from tokens [64 blocks], non-negative; weights
   [64 blocks], their lower and upper halves; and the weights' sums over each block, [blocks]. Vector units below
   AVX-512 cannot multiply 64 bits, but all multiply 32 by 32 bits: with w = 2^32 h + l

       sum w (t + 1) = sum w + sum l t + 2^32 sum h t      modulo 2^64 */
struct halves {
    const uint32_t *lower, *upper;
};

static uint64_t sum_of_products(const uint32_t *t, const struct halves w) {
    uint64_t low = 0, high = 0;
    for (int64_t i = 0; i < BLOCK_TOKENS; i++) {
        low += (uint64_t)w.lower[i] * t[i];
        high += (uint64_t)w.upper[i] * t[i];
    }
    return low + (high << 32);
}

static inline __attribute__((always_inline)) void hash_all(uint64_t (*sum_of)(const uint32_t *, const struct halves),
                                                           const uint32_t *tokens, const struct halves weights,
                                                           const uint64_t *weight_sums, int64_t blocks,
                                                           uint64_t chain_seed, uint64_t *hashes) {
    uint64_t sum = 0;
    for (int64_t block = 0; block < blocks; block++) {
        int64_t first = BLOCK_TOKENS * block;
        const struct halves of_block = {weights.lower + first, weights.upper + first};
        sum += weight_sums[block] + sum_of(tokens + first, of_block);
        hashes[block] = splitmix64(sum ^ chain_seed);
    }
}

#ifdef __x86_64__
#include <immintrin.h>

/* `_mm256_mul_epu32` multiplies the even 32-bit lanes. The compiler would move one pair at a time. */
__attribute__((target("avx2"))) static inline uint64_t sum_of_products_avx2(const uint32_t *t, const struct halves w) {
    __m256i low[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()}, high[2] = {low[0], low[0]};
    for (int64_t i = 0; i < BLOCK_TOKENS; i += 8) {
        __m256i tokens = _mm256_loadu_si256((const void *)(t + i)), odd_tokens = _mm256_srli_epi64(tokens, 32);
        __m256i lower = _mm256_loadu_si256((const void *)(w.lower + i));
        __m256i upper = _mm256_loadu_si256((const void *)(w.upper + i));
        low[0] = _mm256_add_epi64(low[0], _mm256_mul_epu32(tokens, lower));
        low[1] = _mm256_add_epi64(low[1], _mm256_mul_epu32(odd_tokens, _mm256_srli_epi64(lower, 32)));
        high[0] = _mm256_add_epi64(high[0], _mm256_mul_epu32(tokens, upper));
        high[1] = _mm256_add_epi64(high[1], _mm256_mul_epu32(odd_tokens, _mm256_srli_epi64(upper, 32)));
    }
    __m256i sums = _mm256_add_epi64(_mm256_add_epi64(low[0], low[1]),
                                    _mm256_slli_epi64(_mm256_add_epi64(high[0], high[1]), 32));
    __m128i pair = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    return (uint64_t)_mm_cvtsi128_si64(pair) + (uint64_t)_mm_extract_epi64(pair, 1);
}

__attribute__((target("avx2"))) static void hash_all_avx2(const uint32_t *tokens, const struct halves weights,
                                                          const uint64_t *weight_sums, int64_t blocks,
                                                          uint64_t chain_seed, uint64_t *hashes) {
    hash_all(sum_of_products_avx2, tokens, weights, weight_sums, blocks, chain_seed, hashes);
}
#endif

void quire_prefix_hashes(const int32_t *tokens, const uint32_t *lower, const uint32_t *upper,
                         const uint64_t *weight_sums, int64_t blocks, uint64_t chain_seed, uint64_t *hashes) {
    const struct halves weights = {lower, upper};
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2")) {
        hash_all_avx2((const uint32_t *)tokens, weights, weight_sums, blocks, chain_seed, hashes);
        return;
    }
#endif
    hash_all(sum_of_products, (const uint32_t *)tokens, weights, weight_sums, blocks, chain_seed, hashes);
}

enum { KEYS = 5 }; /* of a line */

/* A bucket, or entries that did not fit into it: a cache line. */
struct line {
    uint64_t keys[KEYS]; /* 0: an empty place */
    int32_t ids[KEYS];
    int32_t link; /* index of another line, 0: none */
};

/* Mirrored in `quire/router/compiled_router.py`. */
struct block_table {
    const struct line *lines;
    uint64_t num_buckets;
    uint64_t low, high; /* masks of a bucket's number: high, or low if no such bucket exists yet */
    uint64_t secret; /* factor that hashes are mixed with; also the key of hash 0 */
};

static uint64_t key_of(const struct block_table *table, uint64_t hash) { return hash ? hash : table->secret; }

static const struct line *bucket_of(const struct block_table *table, uint64_t key) {
    uint64_t product = (key ^ (key >> 32) * table->secret) * table->secret;
    uint64_t mixed = __builtin_bswap64((product ^ product >> 32) * table->secret), bucket = mixed & table->high;
    return table->lines + (bucket < table->num_buckets ? bucket : mixed & table->low);
}

/* A look-up costs mostly a cache miss, so prefetch its line. The function must be inlined: GCC treats it as a function
   without effect and would remove calls of it. */
static inline __attribute__((always_inline)) void begin_look_up(const struct block_table *table, uint64_t hash) {
    __builtin_prefetch(bucket_of(table, key_of(table, hash)));
}

enum { LINE = 8 }; /* places are 64-bit words: 8 in a line */

/* Return the id of a hash, 0 if it is absent, and its place. */
static int32_t look_up(const struct block_table *table, uint64_t hash, int64_t *place) {
    uint64_t key = key_of(table, hash);
    const struct line *line = bucket_of(table, key);
    for (;;) {
        unsigned hits = 0; /* no branch per key: the position of a key is not predictable */
        for (int k = 0; k < KEYS; k++) hits |= (unsigned)(line->keys[k] == key) << k;
        if (hits) {
            int k = __builtin_ctz(hits);
            *place = LINE * (line - table->lines) + k;
            return line->ids[k];
        }
        if (!line->link) return 0;
        line = table->lines + line->link;
    }
}

/* Write ids, places [n]; for absent hashes id 0 and an undefined place. */
void quire_find_blocks(const struct block_table *table, const uint64_t *hashes, int64_t n, int32_t *ids,
                       int64_t *places) {
    for (int64_t i = -AHEAD; i < n; i++) {
        if (i + AHEAD < n) begin_look_up(table, hashes[i + AHEAD]);
        if (i < 0) continue;
        places[i] = 0;
        ids[i] = look_up(table, hashes[i], places + i);
    }
}

/* Cut hashes into runs with the same id. Write each run's first index and id (0 for absent hashes) to `starts` and
   `ids`, [n]; return the number of runs. */
int64_t quire_find_runs(const struct block_table *table, const uint64_t *hashes, int64_t n, int32_t *starts,
                        int32_t *ids) {
    int64_t num_runs = 0, place;
    for (int64_t i = -AHEAD; i < n; i++) {
        if (i + AHEAD < n) begin_look_up(table, hashes[i + AHEAD]);
        if (i < 0) continue;
        int32_t id = look_up(table, hashes[i], &place);
        if (num_runs && id == ids[num_runs - 1]) continue;
        starts[num_runs] = (int32_t)i;
        ids[num_runs++] = id;
    }
    return num_runs;
}

/* The holders of each block, as bits of the replicas' slots. Mirrored in `quire/router/compiled_router.py`. */
struct holders {
    const struct block_table *table; /* hash -> number of a set */
    const uint64_t *sets;            /* [sets, words] */
    int64_t words;
    const uint64_t *live; /* [live_words], at most `words`: holders that a match may find */
    int64_t live_words;
    const int64_t *rows; /* [64 live_words] of the slots, -1: none */
    uint64_t *alive;     /* [live_words], scratch: holders of all blocks so far */
};

/* The output, [num] by row. */
struct depths {
    double *of_row;
    int64_t num;
};

static void write_depth(const struct holders *holders, int64_t word, uint64_t bits, double depth,
                        const struct depths depths) {
    for (; bits; bits &= bits - 1) {
        int64_t row = holders->rows[64 * word + __builtin_ctzll(bits)];
        if (row >= 0 && row < depths.num) depths.of_row[row] = depth;
    }
}

/* The blocks of a chain at which the match of some holder ends (it has all blocks before, but not this one): arrays
   with one entry per block of the chain. Mirrored in `quire/router/compiled_router.py`. */
struct ends {
    uint64_t *hashes;
    int32_t *blocks, *ids; /* their indices in the chain, and the numbers of their holders' sets */
};

/* Match a chain of hashes with each replica's blocks, from the first block on. Write `block` times the matched blocks,
   at most `most`, to the replica's row of `of_row`, [num_rows] zeros. Return the longest match in blocks, and in the
   upper half the number of ends. */
int64_t quire_match(const struct holders *holders, const uint64_t *hashes, int64_t n, double block, double most,
                    double *of_row, int64_t num_rows, const struct ends *ends) {
    const struct depths depths = {of_row, num_rows};
    int64_t num_ends = 0, longest = 0, place;
    int64_t words = holders->live_words;
    uint64_t *alive = holders->alive, some = 0;
    for (int64_t w = 0; w < words; w++) some |= alive[w] = holders->live[w];
    int32_t last = -1;
    for (int64_t i = -AHEAD; i < n && some; i++) {
        if (i + AHEAD < n) begin_look_up(holders->table, hashes[i + AHEAD]);
        if (i < 0) continue;
        int32_t id = look_up(holders->table, hashes[i], &place);
        if (id == last) continue;
        last = id;
        const uint64_t *set = holders->sets + id * holders->words;
        double depth = (double)i * block < most ? (double)i * block : most;
        uint64_t some_lost = 0;
        some = 0;
        for (int64_t w = 0; w < words; w++) {
            uint64_t lost = alive[w] & ~set[w];
            some_lost |= lost;
            some |= alive[w] &= set[w];
            if (lost && i) write_depth(holders, w, lost, depth, depths);
        }
        if (!some_lost) continue;
        ends->hashes[num_ends] = hashes[i];
        ends->blocks[num_ends] = (int32_t)i;
        ends->ids[num_ends++] = id;
        longest = i;
    }
    if (some) {
        double depth = (double)n * block < most ? (double)n * block : most;
        for (int64_t w = 0; w < words; w++) write_depth(holders, w, alive[w], depth, depths);
        longest = n;
    }
    return longest | num_ends << 32;
}
