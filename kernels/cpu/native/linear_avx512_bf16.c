/* The packed GEMM in bfloat16 with AVX-512 BF16, which multiplies pairs of bfloat16. */
#include "linear.h"

#if defined(__x86_64__)
#define TARGETED __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")))
#define FN static inline __attribute__((always_inline, target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")))
#define LINEAR_WORKER quire_linear_avx512_bf16
#define DOT_BF16 1
#define BLOCK_ROWS 6
#define PAIR_ROWS 6
#define WIDE_ROWS 0
#define STREAM_ROWS 0
#define MAX_VECTORS 4
#define VECTORS_OF(rows) 4
/* This code runs on AMD's processors from Zen 4 on; Intel's use matrix registers or float32 (`quire_best_isa`). Zen 4's L1 cache is as
 * large as a chunk: a prefetch of the next chunk evicted the current one, and 8 rows ran at two thirds of the speed. Hardware prefetchers recognise
 * a tile that reads front to back; additional prefetches reduced it to 70% of the speed (kernels/README.md). Zen 5's L1 cache is 50%
 * larger and holds both chunks. */
#define AHEAD_LEVEL 2
#define FOLLOWS_CACHE 1
#define AHEAD_FROM 7

#include "simd_avx512.h"

#include "linear_tile.h"
#endif
