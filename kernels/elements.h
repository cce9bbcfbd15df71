// Loads and stores 16 elements of a row as float32, for any dtype, with the rounding of rows.h.
#pragma once

#include "rows.h"
#include "simd.h"

// Calls work<DTYPE>() for the dtype.
template <class Work> void for_dtype(Dtype dtype, Work &&work) {
  if (dtype == Dtype::float32)
    work.template operator()<Dtype::float32>();
  else if (dtype == Dtype::bfloat16)
    work.template operator()<Dtype::bfloat16>();
  else
    work.template operator()<Dtype::float16>();
}

template <Dtype DTYPE> constexpr int64_t ELEMENT_BYTES = DTYPE == Dtype::float32 ? 4 : 2;

// Loads elements `first` to `first` + 15 of a row of `count` elements; 0 after its end.
template <Dtype DTYPE> Floats load_elements(const void *row, int64_t first, int64_t count) {
  const char *at = static_cast<const char *>(row) + first * ELEMENT_BYTES<DTYPE>;
  alignas(64) char part[LANES * ELEMENT_BYTES<DTYPE>] = {};
  if (first + LANES > count) [[unlikely]] {
    if (first < count) std::memcpy(part, at, (count - first) * ELEMENT_BYTES<DTYPE>);
    at = part;
  }
  if constexpr (DTYPE == Dtype::float32)
    return load(reinterpret_cast<const float *>(at));
  else if constexpr (DTYPE == Dtype::bfloat16)
    return as_floats(shift_left<16>(load_halves(reinterpret_cast<const uint16_t *>(at))));
  else
    return load_float16(reinterpret_cast<const uint16_t *>(at));
}

// Stores the elements that are inside the row. They must be representable in the dtype.
template <Dtype DTYPE> void store_elements(void *row, int64_t first, int64_t count, Floats x) {
  char *at = static_cast<char *>(row) + first * ELEMENT_BYTES<DTYPE>;
  alignas(64) char part[LANES * ELEMENT_BYTES<DTYPE>];
  char *const to = first + LANES > count ? part : at;
  if constexpr (DTYPE == Dtype::float32)
    store(reinterpret_cast<float *>(to), x);
  else if constexpr (DTYPE == Dtype::bfloat16)
    store_halves(reinterpret_cast<uint16_t *>(to), bit_and(shift_right<16>(as_ints(x)), splat(0xffff)));
  else
    store_float16(reinterpret_cast<uint16_t *>(to), x);
  if (to == part && first < count) [[unlikely]] std::memcpy(at, part, (count - first) * ELEMENT_BYTES<DTYPE>);
}

// Rounds to the dtype and converts back.
template <Dtype DTYPE> Floats rounded(Floats x) {
  if constexpr (DTYPE == Dtype::float32) return x;
  if constexpr (DTYPE == Dtype::bfloat16) return round_to_bfloat16(x);
  uint16_t halves[LANES];
  store_float16(halves, x);
  return load_float16(halves);
}
