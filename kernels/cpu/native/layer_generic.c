/* Any processor. */
#include "layer.h"

#define TARGETED
#define FN static inline __attribute__((always_inline))
#define NAME(function) quire_##function##_generic

#include "simd_generic.h"

#include "layer_tile.h"
