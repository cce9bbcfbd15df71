// silu(gate) * up of 16 lanes at a time; every element is computed alike, wherever it stands.
#pragma once

#include "exp.h"
#include "rows.h"

// gate becomes silu(gate) * up: `count` float32, a multiple of 16, that have been rounded to the dtype. silu is rounded before it is multiplied.
inline void swiglu(Dtype dtype, float *gate, const float *up, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) {
    const Floats x = load(gate + i);
    store(gate + i, divide(x, add(splat(1.0f), exp(subtract(splat(0.0f), x)))));
  }
  round_to(dtype, gate, count);
  for (int64_t i = 0; i < count; ++i) gate[i] *= up[i];
}
