/* Attention in bfloat16 with AVX-512 BF16, which multiplies pairs of bfloat16. */
#include "attention.h"

#if defined(__x86_64__)
#define TARGETED __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")))
#define FN static inline __attribute__((always_inline, target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")))
#define WORKER quire_attention_avx512_bf16
#define TAKES_HEADS quire_takes_heads_avx512_bf16
#define EXP2 quire_exp2_avx512_bf16
#define DOT_BF16 1
#define BLOCK_ROWS 6
#define MATRIX_REGISTERS 0
#define AHEAD_LEVEL 2
#define MAX_VECTORS 4
#define PAGE_VECTORS(rows) 4

#include "simd_avx512.h"

#include "attention_tile.h"
#endif
