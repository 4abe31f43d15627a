/* What a request costs on each replica (`quire/router/policy/cost.py` derives it), and where it costs least.

   The same in numpy is in `quire/router/policy/cost_terms.py` and `quire/router/policy/policy.py`: the same operations in the same
   order, and none fused, so that the bits are the same. */
#include <stdint.h>

#include "clones.h"

/* `quire/router/policy/columns.py` */
enum {
    REPORT_S = 1,
    QUEUED_TOKENS,
    BOOKED_WORK,
    UNANSWERED_WORK,
    HEAD_WORK,
    HEAD_S,
    NUM_REQUESTS,
    KV_TOKENS,
    CACHE_AGE_S,
    FREE_TOKENS,
    USED_TOKENS,
    HOST_COPY_S_PER_TOKEN,
    MEAN_KV_TOKENS = 14,
};

/* `Prices` of `cost_terms.py`. */
struct prices {
    double now_s, prompt_tokens, work_per_token, per_context, max_decay_s, head_done, eta;
    double later, per_window, decode_s, eviction, memory, output_s, copies_s;
};

/* What is known of the replicas: columns [NUM_COLUMNS, n], rows `stride` apart; gpu, host, speed [n]; reuse [n], the
   chance that what is evicted were used again, or null: `_Fleet` of `cost_terms.py`. */
struct fleet {
    const double *columns;
    int64_t stride;
    const double *gpu, *host, *speed, *reuse;
};

/* The longest prefix that anybody holds, and what each token less of it will cost its followers. */
struct copies {
    double longest, saved_s;
};

/* `TERMS` of `cost_terms.py`. */
struct terms {
    double wait, prefill, host_copy, interference, later, decode, eviction, memory, copy_value;
};

enum { MAX_RANKED = 16 }; /* `quire/router/policy/policy.py` */

/* What is found beside the costs: `_Found` of `cost_terms.py`. */
struct found {
    struct copies copies;
    double oldest_report_s;
    struct terms terms[MAX_RANKED]; /* of these rows */
    int32_t rows[MAX_RANKED];       /* cheapest first */
};

static inline double min(double a, double b) { return a < b ? a : b; }
static inline double max(double a, double b) { return a > b ? a : b; }

static inline __attribute__((always_inline)) struct terms terms_of(const struct fleet f, const struct prices p,
                                                                   const struct copies copies, double reuse,
                                                                   int64_t i) {
#define COLUMN(name) f.columns[name * f.stride + i]
    double cached = f.gpu[i] + f.host[i], missing = p.prompt_tokens - cached, speed = f.speed[i];
    double reported = COLUMN(QUEUED_TOKENS) * p.work_per_token * speed;
    reported = max(reported - min(p.now_s - COLUMN(REPORT_S), p.max_decay_s), 0.0) + COLUMN(BOOKED_WORK) * speed;
    double head_done = min(COLUMN(HEAD_WORK) * speed * p.head_done, p.now_s - COLUMN(HEAD_S));
    double short_of = max(missing - COLUMN(FREE_TOKENS), 0.0), requests = COLUMN(NUM_REQUESTS);
    struct terms t;
    t.wait = max(reported, COLUMN(UNANSWERED_WORK) * speed - head_done);
    t.prefill = missing * (1.0 + (cached + missing * 0.5) * p.per_context) * speed;
    t.host_copy = f.host[i] * COLUMN(HOST_COPY_S_PER_TOKEN);
    t.interference = p.eta * t.prefill * requests;
    double window = t.wait + t.prefill;
    t.later = window / (window * p.per_window + 1.0) * t.prefill * p.later;
    t.decode = (requests * (0.5 * p.prompt_tokens) + COLUMN(MEAN_KV_TOKENS)) * p.decode_s;
    t.eviction = reuse * (missing * speed) * p.eviction;
    t.memory = p.memory * short_of / max(COLUMN(USED_TOKENS), 1.0) * (p.output_s * COLUMN(KV_TOKENS));
    t.copy_value = (cached - copies.longest) * copies.saved_s;
    return t;
}

static inline double sum_of(const struct terms t) {
    return t.wait + t.prefill + t.host_copy + t.interference + t.later + t.decode + t.eviction + t.memory +
           t.copy_value;
}

enum { LANES = 8 }; /* independent of each other, which the compiler may not assume of one maximum */

CLONES static struct copies copies_of(const struct fleet f, int64_t n, double copies_s) {
    struct copies found = {0, 0};
    if (copies_s <= 0) return found;
    double longest[LANES] = {0};
    int64_t holders = 0, whole = n - n % LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int k = 0; k < LANES; k++) longest[k] = max(f.gpu[i + k] + f.host[i + k], longest[k]);
    for (int64_t i = whole; i < n; i++) longest[0] = max(f.gpu[i] + f.host[i], longest[0]);
    for (int k = 0; k < LANES; k++) found.longest = max(longest[k], found.longest);
    for (int64_t i = 0; i < n; i++) holders += f.gpu[i] + f.host[i] == found.longest;
    if (found.longest > 0) found.saved_s = copies_s / (double)(holders * (holders + 1)) / found.longest;
    return found;
}

CLONES static double smallest_of(const double *values, int64_t n) {
    double least[LANES];
    int64_t whole = n - n % LANES;
    for (int k = 0; k < LANES; k++) least[k] = values[0];
    for (int64_t i = 0; i < whole; i += LANES)
        for (int k = 0; k < LANES; k++) least[k] = min(values[i + k], least[k]);
    for (int64_t i = whole; i < n; i++) least[0] = min(values[i], least[0]);
    for (int k = 1; k < LANES; k++) least[0] = min(least[k], least[0]);
    return least[0];
}

/* wait, cost [n]: the first term and the sum of all. */
CLONES static void cost_of_all(const struct fleet f, int64_t n, const struct prices p, const struct copies found,
                               double *wait, double *cost) {
    if (f.reuse) {
#pragma GCC ivdep /* nobody else has `wait` and `cost`; the columns are too many to look at each */
        for (int64_t i = 0; i < n; i++) {
            struct terms t = terms_of(f, p, found, f.reuse[i], i);
            wait[i] = t.wait;
            cost[i] = sum_of(t);
        }
    } else {
#pragma GCC ivdep
        for (int64_t i = 0; i < n; i++) {
            struct terms t = terms_of(f, p, found, 0, i);
            wait[i] = t.wait;
            cost[i] = sum_of(t);
        }
    }
}

/* All terms of some replicas: rows [num], terms [num, terms of struct terms]. */
void quire_terms(const struct fleet *fleet, const struct prices *prices, const struct copies *copies,
                 const int32_t *rows, int64_t num, struct terms *terms) {
    for (int64_t k = 0; k < num; k++) {
        double reuse = fleet->reuse ? fleet->reuse[rows[k]] : 0;
        terms[k] = terms_of(*fleet, *prices, *copies, reuse, rows[k]);
    }
}

/* The rows of the `most` smallest of [n] to `rows`, [most], smallest first and equal ones in their order; how many
   they are. */
int64_t quire_smallest(const double *values, int64_t n, int64_t most, int32_t *rows) {
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++) {
        double value = values[i];
        if (kept == most && !(value < values[rows[kept - 1]])) continue;
        int64_t place = kept < most ? kept++ : kept - 1;
        for (; place > 0 && values[rows[place - 1]] > value; place--) rows[place] = rows[place - 1];
        rows[place] = (int32_t)i;
    }
    return kept;
}

/* For a test: Python says how large it is as well. */
int64_t quire_found_size(void) { return sizeof(struct found); }

enum { NEEDS_REUSE = -1 }; /* of `cost_terms.py` */

/* wait, cost [n]: the first term and the sum of all; of the session's row, -1: none, less that part of its prefill.
   Returns how many rows of `found` there are, and in the upper half 1 if others cost the same as the first within
   `tie`; or NEEDS_REUSE, since some evict and `reuse` is null. */
int64_t quire_price(const struct fleet *fleet, int64_t n, const struct prices *prices, int64_t session_row,
                    double stickiness, double tie, double *wait, double *cost, struct found *found) {
    if (!fleet->reuse && smallest_of(fleet->columns + CACHE_AGE_S * fleet->stride, n) < __builtin_inf())
        return NEEDS_REUSE;
    const struct copies copies = found->copies = copies_of(*fleet, n, prices->copies_s);
    cost_of_all(*fleet, n, *prices, copies, wait, cost);
    if (session_row >= 0) cost[session_row] -= stickiness * terms_of(*fleet, *prices, copies, 0, session_row).prefill;
    found->oldest_report_s = smallest_of(fleet->columns + REPORT_S * fleet->stride, n);
    int64_t num = quire_smallest(cost, n, MAX_RANKED, found->rows);
    quire_terms(fleet, prices, &copies, found->rows, num, found->terms);
    int64_t is_tied = num > 1 && cost[found->rows[1]] <= cost[found->rows[0]] + tie;
    return num | is_tied << 32;
}
