/* Entry points of attention, and detection of the processor's instruction sets. */
#include "attention.h"

#if HAS_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Whether the processor has AMX with bfloat16 and the operating system lets this process use it. Linux must be asked, because AMX enlarges a
 * thread's saved state; it refuses if a thread's signal stack is too small for that. */
static int may_use_amx(void) {
    enum { LEAF = 7, AMX_BF16_BIT = 1 << 22, AMX_TILE_BIT = 1 << 24, ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    unsigned a, b, c, d;
    if (!__get_cpuid_count(LEAF, 0, &a, &b, &c, &d) || !(d & AMX_BF16_BIT) || !(d & AMX_TILE_BIT)) return 0;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#else
static inline int may_use_amx(void) { return 0; }
#endif

int64_t quire_abi(void) { return QUIRE_ABI; }

/* The last `enum isa` that this processor has; it has all before it, too. */
int64_t quire_last_isa(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) return may_use_amx() ? AMX_BF16 : AVX512_BF16;
    return avx512 ? AVX512 : avx2 ? AVX2 : GENERIC;
#else
    return GENERIC;
#endif
}

/* The fastest instruction set. On Intel processors without AMX, or if a virtual machine hides it, a multiplication of bfloat16 pairs (VDPBF16PS)
 * takes two cycles, and two float32 instructions take one: 32 products in the time of 64. So AVX512 is faster there. */
int64_t quire_best_isa(void) {
    int64_t last = quire_last_isa();
#if defined(__x86_64__)
    if (last == AVX512_BF16 && __builtin_cpu_is("intel")) return AVX512;
#endif
    return last;
}

int64_t quire_scratch_bytes(int64_t head_dim) {
    struct scratch scratch;
    return place_scratch(&scratch, NULL, head_dim);
}

int64_t quire_call_bytes(void) { return sizeof(struct attention_call); }

int64_t quire_partial_floats(int64_t head_dim) { return row_floats(head_dim); }

/* Number of KV heads of an item: as many as possible while every thread still has enough items, or, if there is only one unit, while the items
 * divide evenly among the threads. */
static int64_t item_heads(const struct attention_call *call, int64_t num_threads) {
    enum { THREAD_ITEMS = 4 };
    const int64_t units = call->plan.num_units, kv_heads = call->kv_heads;
    for (int64_t heads = kv_heads < MAX_ITEM_HEADS ? kv_heads : MAX_ITEM_HEADS; heads > 1; heads--) {
        const int64_t unit_items = kv_heads / heads;
        if (kv_heads % heads) continue;
        if (units * unit_items >= THREAD_ITEMS * num_threads || (units == 1 && unit_items % num_threads == 0)) return heads;
    }
    return 1;
}

void quire_attention_job(struct job *job, struct attention_call *call, int64_t isa, int64_t num_threads) {
    int64_t (*worker)(void *) = quire_attention_generic;
    int64_t (*takes_heads)(const struct attention_call *) = quire_takes_heads_generic;
#define CHOOSE(name) \
    do { \
        worker = quire_attention_##name; \
        takes_heads = quire_takes_heads_##name; \
    } while (0)
#if defined(__x86_64__)
    if (isa == AVX2) CHOOSE(avx2);
    if (isa >= AVX512) CHOOSE(avx512);
    if (isa >= AVX512_BF16 && call->dtype == BFLOAT16) CHOOSE(avx512_bf16);
#if HAS_AMX
    if (isa == AMX_BF16 && call->dtype == BFLOAT16) CHOOSE(amx);
#endif
#else
    (void)isa;
#endif
#undef CHOOSE
    for (int64_t t = 0; t < call->plan.num_tiles; t++) {
        if (call->plan.tiles[t].first_partial < 0) continue;
        for (int64_t head = 0; head < call->kv_heads; head++)
            call->plan.missing[t * call->kv_heads + head] = tile_splits(&call->plan.tiles[t]);
    }
    job->worker = worker;
    job->call = call;
    call->item_heads = takes_heads(call) ? item_heads(call, num_threads) : 1;
    job->units = call->plan.num_units * (call->kv_heads / call->item_heads);
    job->num_threads = num_threads;
    team_divide(&job->team, job->units, num_threads);
    call->team = &job->team;
}

/* Compute attention. With `parallel` NULL it runs on the calling thread alone. */
void quire_attention(struct attention_call *call, int64_t isa, parallel_function *parallel, int64_t num_threads) {
    struct job job;
    quire_attention_job(&job, call, isa, num_threads);
    job_run(&job, parallel);
}

/* y[i] = 2^x[i] as in the softmax, for a test that measures its error; count is a multiple of LANES. */
void quire_exp2(const float *x, float *y, int64_t count, int64_t isa) {
#if defined(__x86_64__)
    if (isa == AVX2) quire_exp2_avx2(x, y, count);
    if (isa == AVX512) quire_exp2_avx512(x, y, count);
    if (isa >= AVX512_BF16) quire_exp2_avx512_bf16(x, y, count);
#endif
    if (isa == GENERIC) quire_exp2_generic(x, y, count);
}
