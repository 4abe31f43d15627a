/* How a team of threads shares numbered units of work.
 *
 *     units     0 ................ | ................ | ................ n
 *     thread           0                   1                   2
 *
 * Each thread has a range of neighbouring units, takes them in order, and then helps with what is left of the others'
 * ranges. Units that follow each other lie side by side in memory: threads that took them in turns would read
 * what the other's prefetcher has just fetched past the end of its unit, and with two threads a matrix product of
 * 32 to 128 rows ran at 80% of the speed, attention of 16 decode rows at half of it (kernels/README.md).
 */
#ifndef QUIRE_TEAM_H
#define QUIRE_TEAM_H

#include <stdint.h>

enum { MAX_RANGES = 64, CACHE_LINE = 64 };

/* `GOMP_parallel` of whatever OpenMP runtime the process has: run `function` on a team of threads. */
typedef void parallel_function(void (*function)(void *), void *argument, unsigned num_threads, unsigned flags);

/* On a line of its own: its owner counts in it while others count in theirs. */
struct range {
    _Alignas(CACHE_LINE) int64_t next;
    int64_t end;
};

struct team {
    int64_t num_ranges;
    int64_t joined; /* threads that have begun, where they have no place of their own */
    struct range ranges[MAX_RANGES];
};

/* A thread's place in a team. */
struct member {
    int64_t thread;   /* from 0 */
    int64_t range;    /* where it takes units */
    int64_t finished; /* ranges that it found empty */
};

/* A call that a team shares; all of it is settled before threads begin. */
struct job {
    int64_t (*worker)(void *call); /* takes units until none is left; returns how many of them it has done */
    void *call;
    int64_t units;
    int64_t num_threads; /* that are worth starting for this call alone */
    struct team team;    /* for the call to point to */
};

/* On `num_threads` threads of `parallel`; where that is NULL, or one is asked for, on the calling one. */
static inline void team_run(void (*worker)(void *), void *call, parallel_function *parallel, int64_t num_threads) {
    if (parallel && num_threads > 1) {
        parallel(worker, call, (unsigned)num_threads, 0);
    } else {
        worker(call);
    }
}

static inline void team_divide(struct team *team, int64_t units, int64_t num_threads) {
    team->num_ranges = num_threads < 1 ? 1 : num_threads < MAX_RANGES ? num_threads : MAX_RANGES;
    team->joined = 0;
    for (int64_t r = 0; r < team->num_ranges; r++) {
        team->ranges[r].next = units * r / team->num_ranges;
        team->ranges[r].end = units * (r + 1) / team->num_ranges;
    }
}

/* This thread's place in all teams of the calls that run one after the other, so that it can tell what it will take next; -1: it has
 * none, and its place in a team is the order in which it joins. */
extern _Thread_local int64_t quire_place;

static inline struct member team_join(struct team *team) {
    int64_t thread = quire_place >= 0 ? quire_place : __atomic_fetch_add(&team->joined, 1, __ATOMIC_RELAXED);
    return (struct member){thread, thread % team->num_ranges, 0};
}

/* A worker's view of `parallel`. */
static inline void job_work(void *argument) {
    struct job *job = argument;
    job->worker(job->call);
}

static inline void job_run(struct job *job, parallel_function *parallel) {
    team_run(job_work, job, parallel, job->num_threads);
}

/* The next unit of the range that a thread takes from, or -1 when none is left: then it goes on to the next range. */
static inline int64_t team_take_from_range(struct team *team, struct member *member) {
    struct range *range = &team->ranges[member->range];
    int64_t unit = __atomic_fetch_add(&range->next, 1, __ATOMIC_RELAXED);
    if (unit < range->end) return unit;
    member->range = (member->range + 1) % team->num_ranges;
    member->finished++;
    return -1;
}

/* The next unit of a thread's own range, or -1 when none is left: to look ahead at. What others have not begun, a thread that still
 * works is not to take from them. */
static inline int64_t team_take_own(struct team *team, struct member *member) {
    return member->finished ? -1 : team_take_from_range(team, member);
}

/* The next unit of a thread, or -1 when none is left. */
static inline int64_t team_take(struct team *team, struct member *member) {
    int64_t unit = -1;
    while (unit < 0 && member->finished < team->num_ranges) unit = team_take_from_range(team, member);
    return unit;
}

#endif
