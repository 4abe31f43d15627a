#ifndef QUIRE_ROUTER_CLONES_H
#define QUIRE_ROUTER_CLONES_H

/* Compiled for several instruction sets, of which the loader takes the best that the processor has. */
#if defined(__x86_64__) && defined(__gnu_linux__) && (!defined(__clang__) || __clang_major__ >= 14)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

#endif
