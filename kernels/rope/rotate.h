// Rotation of pairs of a head's channels by the angles of its token.
#pragma once

#include <algorithm>
#include <cstdint>

template <int64_t STEP>
inline void rotate_pairs(const float *first, const float *second, const float *cos, const float *sin, int64_t count, float *__restrict to_first,
                       float *__restrict to_second) {
  for (int64_t i = 0; i < count; ++i) {
    const float a = first[i * STEP], b = second[i * STEP];
    to_first[i * STEP] = a * cos[i] - b * sin[i];
    to_second[i * STEP] = b * cos[i] + a * sin[i];
  }
}

// cos and sin [half]; channels from 2 * half on are copied.
inline void rotate_head(const float *from, int64_t channels, const float *cos, const float *sin, int64_t half, bool interleaved,
                      float *__restrict to) {
  if (interleaved)
    rotate_pairs<2>(from, from + 1, cos, sin, half, to, to + 1);
  else
    rotate_pairs<1>(from, from + half, cos, sin, half, to, to + half);
  std::copy(from + 2 * half, from + channels, to + 2 * half);
}
