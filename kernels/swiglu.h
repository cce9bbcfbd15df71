// silu(gate) * up, 16 lanes at a time. The bits of an element do not depend on its index.
#pragma once

#include "exp.h"
#include "rows.h"

// Overwrites gate with silu(gate) * up: `count` float32, a multiple of 16, with values of the dtype. silu is rounded
// before the product.
inline void swiglu(Dtype dtype, float *gate, const float *up, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) {
    const Floats x = load(gate + i);
    store(gate + i, divide(x, add(splat(1.0f), exp(subtract(splat(0.0f), x)))));
  }
  round_to(dtype, gate, count);
  for (int64_t i = 0; i < count; ++i) gate[i] *= up[i];
}
