// Writes new keys and values into the paged cache; kernels/kv_store/reference.py is the specification, and the bits are the same.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "../kv_format.h"
#include "../threads.h"

namespace {

constexpr int64_t CHUNK_CHANNELS = 1 << 15;  // worth another thread
constexpr float INT8_MAX_CODE = 127, FLOAT8_MAX_CODE = 448, INT4_MAX_CODE = 15;

uint16_t to_float16(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

// Above 0, so that zeros have codes too. NaN where the vector has one.
float scale_of(const float *x, int64_t channels, float largest_code) {
  float largest = 0;
  bool nan = false;
  for (int64_t i = 0; i < channels; ++i) largest = std::max(largest, std::fabs(x[i])), nan |= std::isnan(x[i]);
  return nan ? NAN : std::max(largest / largest_code, FLT_MIN);
}

int8_t to_int8(float x) { return std::isnan(x) ? 0 : static_cast<int8_t>(std::nearbyint(x)); }

// To nearest, ties to even; above 464 there is only NaN.
uint8_t to_float8(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint8_t sign = bits >> 24 & 0x80;
  bits &= 0x7fffffff;
  if (bits > 0x43e80000) return sign | 0x7f;  // 464, or NaN
  if (bits < 0x3c800000) {                    // 2^-6: its steps are 2^-9
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    return sign | static_cast<uint8_t>(std::nearbyint(magnitude * 512));
  }
  bits += 0x7ffff + (bits >> 20 & 1);
  return sign | static_cast<uint8_t>((bits >> 20) - (120 << 3));
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

void write_vector(const PagedVectors &cache, int64_t index, const float *x) {
  uint8_t *stored = cache.stored + index * cache.stored_size;
  if (cache.format == KVFormat::int4)
    return write_int4(x, cache.channels, cache.scales_size / 2, cache.stored_size, stored,
                      static_cast<uint16_t *>(cache.scales) + index * cache.scales_size);
  const bool int8 = cache.format == KVFormat::int8;
  const float scale = scale_of(x, cache.channels, int8 ? INT8_MAX_CODE : FLOAT8_MAX_CODE);
  static_cast<float *>(cache.scales)[index] = scale;
  if (int8)
    for (int64_t i = 0; i < cache.channels; ++i) stored[i] = static_cast<uint8_t>(to_int8(x[i] / scale));
  else
    for (int64_t i = 0; i < cache.channels; ++i) stored[i] = to_float8(x[i] / scale);
}

void store_token(const PagedVectors &cache, const uint8_t *vectors, int64_t token, int64_t token_stride, int64_t slot) {
  const int64_t element = cache.dtype == Dtype::float32 ? 4 : 2, count = cache.num_heads * cache.channels;
  if (cache.format == KVFormat::unquantised) {
    std::memcpy(cache.stored + slot * count * element, vectors + token * token_stride * element, count * element);
    return;
  }
  thread_local std::vector<float> x;
  x.resize(cache.channels);
  for (int64_t head = 0; head < cache.num_heads; ++head) {
    read_floats(vectors, cache.dtype, token * token_stride + head * cache.channels, cache.channels, x.data());
    write_vector(cache, cache.index(slot, head), x.data());
  }
}

}  // namespace

// key and value [T, G, *] of the caches' dtype; strides from token to token, in elements
extern "C" void kv_store(const uint8_t *key, const uint8_t *value, int64_t key_stride, int64_t value_stride, const PagedVectors *keys,
                         const PagedVectors *values, const int64_t *slots, int64_t num_tokens) {
  const int64_t tokens_per_chunk = std::max<int64_t>(CHUNK_CHANNELS / (keys->num_heads * keys->channels), 1);
  parallel_for((num_tokens + tokens_per_chunk - 1) / tokens_per_chunk, [&](int64_t chunk) {
    for (int64_t token = chunk * tokens_per_chunk; token < std::min((chunk + 1) * tokens_per_chunk, num_tokens); ++token) {
      store_token(*keys, key, token, key_stride, slots[token]);
      store_token(*values, value, token, value_stride, slots[token]);
    }
  });
}
