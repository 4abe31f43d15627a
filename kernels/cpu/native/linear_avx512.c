/* The packed GEMM with AVX-512, in float32. */
#include "linear.h"

#if defined(__x86_64__)
#define TARGETED __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define FN static inline __attribute__((always_inline, target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define LINEAR_WORKER quire_linear_avx512
#define DOT_BF16 0
#define BLOCK_ROWS 12
#define PAIR_ROWS 12
#define WIDE_ROWS 0
#define STREAM_ROWS 0
#define MAX_VECTORS 4
#define VECTORS_OF(rows) ((rows) > 6 ? 2 : 4)
/* A chunk fills two thirds of the L1 cache on Intel's processors, and all of it before Ice Lake. When the next chunk was prefetched into
 * it, it evicted the current one, and a few rows ran at 83% of the speed. */
#define AHEAD_LEVEL 2
#define FOLLOWS_CACHE 0
#define AHEAD_FROM 1

#include "simd_avx512.h"

#include "linear_tile.h"
#endif
