// Writes new keys and values into the paged cache, optionally after rotation. kernels/kv_store/reference.py is the
// specification. Stored codes are bit-identical to the reference. Norm and rotation use the functions of
// kernels/rms_norm and kernels/rope, so results are bit-identical to these operators.
#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <vector>

#include "../kv_format.h"
#include "../operator.h"
#include "../rms_norm/normalise.h"
#include "../rope/rotate.h"
#include "../threads.h"

namespace {

constexpr int64_t CHUNK_CHANNELS = 1 << 12;  // channels that justify another thread
constexpr float INT8_MAX_CODE = 127, FLOAT8_MAX_CODE = 448, INT4_MAX_CODE = 15;

uint16_t to_float16(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

// The scale is above 0, so that zeros can be encoded. It is NaN if the vector contains NaN: bits of magnitudes compare
// like integers, and NaN is the largest.
float scale_of(const float *x, int64_t channels, float largest_code) {
  int32_t largest = 0;
  for (int64_t i = 0; i < channels; ++i) largest = std::max(largest, std::bit_cast<int32_t>(x[i]) & 0x7fffffff);
  return std::max(std::bit_cast<float>(largest) / largest_code, FLT_MIN);
}

// Rounds to nearest, ties to even; above 464 the result is NaN. Below 2^-6 the spacing is 2^-9, which is a unit in the
// last place of 2^14 in float32.
uint8_t to_float8(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffff;
  const uint32_t tiny = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) - std::bit_cast<uint32_t>(0x1p14f);
  const uint32_t normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
  const uint32_t code = magnitude > std::bit_cast<uint32_t>(464.0f) ? 0x7f : magnitude < std::bit_cast<uint32_t>(0x1p-6f) ? tiny : normal;
  return static_cast<uint8_t>(code | (bits >> 24 & 0x80));
}

// x is padded to whole registers.
void write_int8(const float *x, int64_t channels, float scale, uint8_t *codes) {
  for (int64_t i = 0; i < channels; i += LANES) {
    int8_t register_codes[LANES];
    store_bytes(register_codes, round_to_ints(divide(load(x + i), splat(scale))));
    std::memcpy(codes + i, register_codes, std::min(channels - i, LANES));
  }
}

void write_float8(const float *__restrict x, int64_t channels, float scale, uint8_t *__restrict codes) {
  for (int64_t i = 0; i < channels; ++i) codes[i] = to_float8(x[i] / scale);
}

void write_int4(const float *x, int64_t channels, int64_t num_groups, int64_t stored_size, uint8_t *codes, uint16_t *ranges) {
  const int64_t size = 2 * stored_size / num_groups;
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t first = group * size;
    float group_x[128], lowest = INFINITY, highest = -INFINITY;
    bool nan = false;
    for (int64_t i = 0; i < size; ++i) {
      group_x[i] = x[std::min(first + i, channels - 1)];
      lowest = std::min(lowest, group_x[i]), highest = std::max(highest, group_x[i]), nan |= std::isnan(group_x[i]);
    }
    if (nan) lowest = highest = NAN;
    ranges[2 * group] = to_float16((highest - lowest) / INT4_MAX_CODE);
    ranges[2 * group + 1] = to_float16(lowest);
    const float scale = std::max(_cvtsh_ss(ranges[2 * group]), FLT_MIN), base = _cvtsh_ss(ranges[2 * group + 1]);
    for (int64_t i = 0; i < size; i += 2) {
      uint8_t pair[2];
      for (int64_t j = 0; j < 2; ++j) {
        const float code = std::nearbyint((group_x[i + j] - base) / scale);
        pair[j] = static_cast<uint8_t>(code > 0 ? std::min(code, INT4_MAX_CODE) : 0);
      }
      codes[(first + i) / 2] = pair[0] | pair[1] << 4;
    }
  }
}

// Encodes with a static scale: values saturate beyond the largest code, and values that are not finite get the NaN
// code.
void write_static(const float *x, int64_t channels, KVFormat format, float scale, uint8_t *codes) {
  const float largest = format == KVFormat::int8 ? INT8_MAX_CODE : FLOAT8_MAX_CODE;
  for (int64_t i = 0; i < channels; ++i) {
    const float step = std::clamp(x[i] / scale, -largest, largest);
    if (format == KVFormat::int8)
      codes[i] = static_cast<uint8_t>(std::isfinite(x[i]) ? static_cast<int8_t>(std::nearbyint(step)) : -128);
    else
      codes[i] = std::isfinite(x[i]) ? to_float8(step) : 0x7f;
  }
}

// Encodes x, which holds numbers of the cache's dtype and is padded to whole registers.
void write_vector(const PagedVectors &cache, int64_t slot, int64_t head, const float *x) {
  const int64_t index = cache.index(slot, head);
  uint8_t *stored = cache.stored + index * cache.stored_size;
  if (cache.format == KVFormat::int4)
    return write_int4(x, cache.channels, cache.scales_size / 2, cache.stored_size, stored,
                      static_cast<uint16_t *>(cache.scales) + index * cache.scales_size);
  if (cache.has_static_scales())
    return write_static(x, cache.channels, cache.format, static_cast<const float *>(cache.scales)[head], stored);
  const bool int8 = cache.format == KVFormat::int8;
  const float scale = scale_of(x, cache.channels, int8 ? INT8_MAX_CODE : FLOAT8_MAX_CODE);
  static_cast<float *>(cache.scales)[index] = scale;
  if (int8) return write_int8(x, cache.channels, scale, stored);
  write_float8(x, cache.channels, scale, stored);
}

void store_token(const PagedVectors &cache, const uint8_t *vectors, int64_t token, int64_t token_stride, int64_t slot) {
  const int64_t element = cache.dtype == Dtype::float32 ? 4 : 2, count = cache.num_heads * cache.channels;
  if (cache.format == KVFormat::unquantised) {
    std::copy_n(vectors + token * token_stride * element, count * element, cache.stored + slot * count * element);
    return;
  }
  thread_local std::vector<float> x;
  x.resize(cache.channels + LANES);
  for (int64_t head = 0; head < cache.num_heads; ++head) {
    read_floats(vectors, cache.dtype, token * token_stride + head * cache.channels, cache.channels, x.data());
    write_vector(cache, slot, head, x.data());
  }
}

struct Heads {  // [T, count, D] of the caches' dtype
  const void *vectors;
  int64_t count, token_stride;  // stride in elements
  const void *norm;             // weight [D] of the norm before the rotation; null without norm
};

struct Angles {  // [T, half] of the caches' dtype
  const void *cos, *sin;
  int64_t half;
  bool interleaved;
};

struct NewTokens {
  Heads queries, keys;
  const uint8_t *value;  // [T, G, E]
  int64_t value_stride;  // from token to token, in elements
  const int64_t *slots;
  int64_t count;
};

void rotate_and_store(const NewTokens &tokens, const Angles &angles, float eps, void *out, const PagedVectors &keys, const PagedVectors &values) {
  const Dtype dtype = keys.dtype;
  const int64_t channels = keys.channels, half = angles.half, padded = padded_channels(channels), num_queries = tokens.queries.count;
  const int64_t tokens_per_chunk = rows_of_chunk(CHUNK_CHANNELS, (num_queries + 2 * keys.num_heads) * channels);
  parallel_for(divide_up(tokens.count, tokens_per_chunk), [&](int64_t chunk) {
    thread_local std::vector<float> buffer;
    buffer.resize(4 * padded + 2 * half);
    float *row = buffer.data(), *rotated = row + padded, *query_norm = rotated + padded, *key_norm = query_norm + padded;
    float *cos = key_norm + padded, *sin = cos + half;
    std::fill(row + channels, row + padded, 0.0f);
    if (tokens.queries.norm) read_floats(tokens.queries.norm, dtype, 0, channels, query_norm);
    if (tokens.keys.norm) read_floats(tokens.keys.norm, dtype, 0, channels, key_norm);
    const auto rotate = [&](const Heads &heads, const float *norm, int64_t token, int64_t head) {
      read_floats(heads.vectors, dtype, token * heads.token_stride + head * channels, channels, row);
      if (heads.norm) {
        normalise_row(row, norm, channels, dtype, eps);
        round_to(dtype, row, channels);
      }
      rotate_head(row, channels, cos, sin, half, angles.interleaved, rotated);
    };
    for (int64_t token = chunk * tokens_per_chunk; token < std::min((chunk + 1) * tokens_per_chunk, tokens.count); ++token) {
      read_floats(angles.cos, dtype, token * half, half, cos);
      read_floats(angles.sin, dtype, token * half, half, sin);
      for (int64_t head = 0; head < num_queries; ++head) {
        rotate(tokens.queries, query_norm, token, head);
        write_floats(out, dtype, (token * num_queries + head) * channels, channels, rotated);
      }
      for (int64_t head = 0; head < keys.num_heads; ++head) {
        rotate(tokens.keys, key_norm, token, head);
        if (keys.format == KVFormat::unquantised) {
          write_floats(keys.stored, dtype, keys.index(tokens.slots[token], head) * channels, channels, rotated);
        } else {
          round_to(dtype, rotated, channels);
          write_vector(keys, tokens.slots[token], head, rotated);
        }
      }
      store_token(values, tokens.value, token, tokens.value_stride, tokens.slots[token]);
    }
  });
}

}  // namespace

// key and value [T, G, *] of the caches' dtype; strides from token to token, in elements.
OPERATOR(kv_store, (const uint8_t *key, const uint8_t *value, int64_t key_stride, int64_t value_stride, const PagedVectors &keys,
                    const PagedVectors &values, const int64_t *slots, int64_t num_tokens)) {
  const int64_t tokens_per_chunk = rows_of_chunk(CHUNK_CHANNELS, keys.num_heads * keys.channels);
  parallel_for(divide_up(num_tokens, tokens_per_chunk), [&](int64_t chunk) {
    for (int64_t token = chunk * tokens_per_chunk; token < std::min((chunk + 1) * tokens_per_chunk, num_tokens); ++token) {
      store_token(keys, key, token, key_stride, slots[token]);
      store_token(values, value, token, value_stride, slots[token]);
    }
  });
}

// Rotates the keys, then stores keys and values as kv_store does. Writes the rotated queries to out [T, num_queries, D].
// cos and sin [T, half]; query_norm and key_norm [D] or null.
OPERATOR(rope_and_store, (const void *query, const void *key, const uint8_t *value, int64_t query_stride, int64_t key_stride,
                          int64_t value_stride, int64_t num_queries, const void *cos, const void *sin, int64_t half, bool interleaved,
                          const void *query_norm, const void *key_norm, float eps, void *out, const PagedVectors &keys,
                          const PagedVectors &values, const int64_t *slots, int64_t num_tokens)) {
  const Heads queries{query, num_queries, query_stride, query_norm}, new_keys{key, keys.num_heads, key_stride, key_norm};
  rotate_and_store({queries, new_keys, value, value_stride, slots, num_tokens}, {cos, sin, half, interleaved}, eps, out, keys, values);
}
