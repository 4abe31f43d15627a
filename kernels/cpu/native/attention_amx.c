/* Attention in bfloat16 on processors with matrix registers (Intel's AMX). */
#include "attention.h"

#if HAS_AMX
#define TARGETED __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")))
#define FN static inline __attribute__((always_inline, target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")))
#define WORKER quire_attention_amx
#define TAKES_HEADS quire_takes_heads_amx
#define EXP2 quire_exp2_amx
#define DOT_BF16 1
#define MATRIX_REGISTERS 1
#define BLOCK_ROWS 32
#define PAGE_VECTORS(rows) 2
#define AHEAD_LEVEL 2

#include "simd_avx512.h"

#include "attention_tile.h"
#endif
