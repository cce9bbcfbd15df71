// Rotates pairs of channels of x [T, H, D] by the angles of their tokens, and computes the angles.
// kernels/rope/reference.py is the specification. The rotation is computed in float32 and rounded once; the reference
// rounds after each operation if x is narrower.
#include <algorithm>
#include <cmath>
#include <vector>

#include "../operator.h"
#include "../rows.h"
#include "../simd.h"
#include "../threads.h"
#include "rotate.h"

namespace {

constexpr int64_t CHUNK_CHANNELS = 1 << 12;  // channels that justify another thread
constexpr int64_t TOKENS_OF_ANGLES = 16;     // tokens that justify another thread

}  // namespace

// cos and sin [T, half]; the first 2 * half channels are rotated. token_stride: from token to token of x, in elements;
// out is contiguous.
OPERATOR(rope, (const void *x, const void *cos, const void *sin, void *out, Dtype dtype, int64_t num_tokens, int64_t num_heads,
                int64_t channels, int64_t half, int64_t token_stride, bool interleaved)) {
  const int64_t tokens_per_chunk = rows_of_chunk(CHUNK_CHANNELS, num_heads * channels);
  parallel_for(divide_up(num_tokens, tokens_per_chunk), [&](int64_t chunk) {
    thread_local std::vector<float> buffer;
    buffer.resize(2 * channels + 2 * half);
    float *from = buffer.data(), *to = from + channels, *c = to + channels, *s = c + half;
    for (int64_t token = chunk * tokens_per_chunk; token < std::min((chunk + 1) * tokens_per_chunk, num_tokens); ++token) {
      read_floats(cos, dtype, token * half, half, c);
      read_floats(sin, dtype, token * half, half, s);
      for (int64_t head = 0; head < num_heads; ++head) {
        read_floats(x, dtype, token * token_stride + head * channels, channels, from);
        rotate_head(from, channels, c, s, half, interleaved, to);
        write_floats(out, dtype, (token * num_heads + head) * channels, channels, to);
      }
    }
  });
}

// positions [T], frequencies [half]; cos and sin [T, half], times `factor`.
OPERATOR(rope_angles, (const int64_t *positions, const float *frequencies, float factor, void *cos, void *sin, Dtype dtype,
                       int64_t num_tokens, int64_t half)) {
  parallel_for(divide_up(num_tokens, TOKENS_OF_ANGLES), [&](int64_t chunk) {
    thread_local std::vector<float> buffer;
    buffer.resize(2 * half);
    float *c = buffer.data(), *s = c + half;
    for (int64_t token = chunk * TOKENS_OF_ANGLES; token < std::min((chunk + 1) * TOKENS_OF_ANGLES, num_tokens); ++token) {
      for (int64_t i = 0; i < half; ++i) {
        const float angle = static_cast<float>(positions[token]) * frequencies[i];
        c[i] = std::cos(angle) * factor, s[i] = std::sin(angle) * factor;
      }
      write_floats(cos, dtype, token * half, half, c);
      write_floats(sin, dtype, token * half, half, s);
    }
  });
}
