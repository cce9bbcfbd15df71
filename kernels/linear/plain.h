// A plain, unpacked weight [outputs, inputs]. Either the outputs or the inputs are contiguous in memory.
#pragma once

#include <algorithm>
#include <cstring>

#include "../rows.h"
#include "../simd.h"

struct Plain {
  const char *numbers;
  int64_t output_stride, input_stride;  // in numbers; one of them is 1
};

// Loads the first `bytes` of 64 bytes; the rest is 0.
inline Ints load_part(const char *at, int64_t bytes) {
  if (bytes >= 64) [[likely]] return load(reinterpret_cast<const uint8_t *>(at));
  alignas(64) uint8_t part[64] = {};
  if (bytes > 0) std::memcpy(part, at, bytes);
  return load(part);
}

// Loads the first `count` of 16 float16 or bfloat16, one per lane; other lanes are 0.
inline Ints load_halves_part(const char *at, int64_t count) {
  if (count >= LANES) [[likely]] return load_halves(reinterpret_cast<const uint16_t *>(at));
  alignas(64) uint16_t part[LANES] = {};
  if (count > 0) std::memcpy(part, at, count * sizeof(uint16_t));
  return load_halves(part);
}

// Writes tile number `tile` in the layout of kernels/linear/float_weight.py.
template <Dtype DTYPE> void pack_tile(const Plain &weight, int64_t num_outputs, int64_t num_inputs, int64_t tile, uint8_t *to) {
  constexpr bool IS_WIDE = DTYPE == Dtype::float32;
  constexpr int64_t BYTES = IS_WIDE ? 4 : 2, INPUTS_OF_STEP = DTYPE == Dtype::bfloat16 ? 2 : 1, STEP_BYTES = LANES * BYTES * INPUTS_OF_STEP;
  const auto put = [&](Ints step) {
    if constexpr (DTYPE == Dtype::float16)
      store_halves(reinterpret_cast<uint16_t *>(to), step);
    else
      store(to, step);
    to += STEP_BYTES;
  };
  const char *first = weight.numbers + tile * LANES * weight.output_stride * BYTES;
  const int64_t present = std::min(LANES, num_outputs - tile * LANES);
  if (weight.input_stride == 1) {
    constexpr int64_t INPUTS = LANES * INPUTS_OF_STEP;  // per register
    for (int64_t input = 0; input < num_inputs; input += INPUTS) {
      Ints rows[LANES];
      for (int64_t lane = 0; lane < LANES; ++lane) {
        const char *at = first + (lane * weight.output_stride + input) * BYTES;
        const int64_t count = lane < present ? num_inputs - input : 0;
        rows[lane] = DTYPE == Dtype::float16 ? load_halves_part(at, count) : load_part(at, count * BYTES);
      }
      transpose(rows);
      for (int64_t step = 0; step < LANES && input + step * INPUTS_OF_STEP < num_inputs; ++step) put(rows[step]);
    }
  } else {
    for (int64_t input = 0; input < num_inputs; input += INPUTS_OF_STEP) {
      const char *at = first + input * weight.input_stride * BYTES;
      if constexpr (IS_WIDE) {
        put(load_part(at, present * BYTES));
      } else {
        Ints step = load_halves_part(at, present);
        if (INPUTS_OF_STEP == 2 && input + 1 < num_inputs)
          step = add(step, shift_left<16>(load_halves_part(at + weight.input_stride * BYTES, present)));
        put(step);
      }
    }
  }
}
