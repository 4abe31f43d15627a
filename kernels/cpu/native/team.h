/* Distribution of numbered units of work among a team of threads.
 *
 *     units     0 ................ | ................ | ................ n
 *     thread           0                   1                   2
 *
 * Each thread has a range of consecutive units and takes them in order; then it takes the remaining units of the other ranges. Consecutive
 * units are contiguous in memory. If threads alternated, each would read what another's hardware prefetcher had fetched beyond the end of its
 * unit: with two threads a GEMM of 32 to 128 rows ran at 80% of the speed, attention of 16 decode rows at half of it
 * (kernels/README.md).
 */
#ifndef QUIRE_TEAM_H
#define QUIRE_TEAM_H

#include <stdint.h>

enum { MAX_RANGES = 64, CACHE_LINE = 64 };

/* `GOMP_parallel` of the process's OpenMP runtime: runs `function` on a team of threads. */
typedef void parallel_function(void (*function)(void *), void *argument, unsigned num_threads, unsigned flags);

/* The units of one thread. On a cache line of its own, because each thread counts in its own range. */
struct range {
    _Alignas(CACHE_LINE) int64_t next;
    int64_t end;
};

struct team {
    int64_t num_ranges;
    int64_t joined; /* threads that have begun, if they have no `quire_place` */
    struct range ranges[MAX_RANGES];
};

/* A thread's state in a team. */
struct member {
    int64_t thread;   /* from 0 */
    int64_t range;    /* range from which it takes units */
    int64_t finished; /* number of ranges that it has found empty */
};

/* A call that a team works on. All fields are set before threads begin. */
struct job {
    int64_t (*worker)(void *call); /* processes units until none is left; returns the number that it has completed */
    void *call;
    int64_t units;
    int64_t num_threads; /* useful number of threads if this call runs alone */
    struct team team;    /* the call points to it */
};

/* Run `worker` on `num_threads` threads of `parallel`, or on the calling thread if `parallel` is NULL or one thread is wanted. */
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

/* Number of this thread in the teams of all calls of a sequence, so that it knows which units it will take next. -1: not in a sequence; its
 * number in a team is then the order in which it joins. */
extern _Thread_local int64_t quire_place;

static inline struct member team_join(struct team *team) {
    int64_t thread = quire_place >= 0 ? quire_place : __atomic_fetch_add(&team->joined, 1, __ATOMIC_RELAXED);
    return (struct member){thread, thread % team->num_ranges, 0};
}

/* Adapts a job's worker to the signature of `parallel`. */
static inline void job_work(void *argument) {
    struct job *job = argument;
    job->worker(job->call);
}

static inline void job_run(struct job *job, parallel_function *parallel) {
    team_run(job_work, job, parallel, job->num_threads);
}

/* Take the next unit of the thread's current range; -1 if none is left, and then the next range becomes the current one. */
static inline int64_t team_take_from_range(struct team *team, struct member *member) {
    struct range *range = &team->ranges[member->range];
    int64_t unit = __atomic_fetch_add(&range->next, 1, __ATOMIC_RELAXED);
    if (unit < range->end) return unit;
    member->range = (member->range + 1) % team->num_ranges;
    member->finished++;
    return -1;
}

/* Take the next unit of the thread's own range, in advance of the current one; -1 if none is left. Units of other ranges are not taken in
 * advance. */
static inline int64_t team_take_own(struct team *team, struct member *member) {
    return member->finished ? -1 : team_take_from_range(team, member);
}

/* Take the next unit, of any range; -1 if none is left. */
static inline int64_t team_take(struct team *team, struct member *member) {
    int64_t unit = -1;
    while (unit < 0 && member->finished < team->num_ranges) unit = team_take_from_range(team, member);
    return unit;
}

#endif
