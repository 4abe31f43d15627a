/* Attention with AVX-512, matrix products in float32. */
#include "attention.h"

#if defined(__x86_64__)
#define TARGETED __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define FN static inline __attribute__((always_inline, target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define WORKER quire_attention_avx512
#define TAKES_HEADS quire_takes_heads_avx512
#define EXP2 quire_exp2_avx512
#define DOT_BF16 0
#define BLOCK_ROWS 6
#define MATRIX_REGISTERS 0
#define AHEAD_LEVEL 2
#define MAX_VECTORS 4
#define PAGE_VECTORS(rows) 4

#include "simd_avx512.h"

#include "attention_tile.h"
#endif
