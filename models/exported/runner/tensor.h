// The values of a step: contiguous tensors that own their memory or are memory-mapped.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

// The input cannot be run. The message is shown to the user.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void require(bool holds, const std::string &otherwise) {
  if (!holds) throw Refused(otherwise);
}

enum class Type : int64_t { uint8 = 1, int8 = 2, int64 = 5, float16 = 6, float32 = 7, bfloat16 = 13 };  // the numbers in torch's schema

inline int64_t bytes_of(Type type) {
  if (type == Type::float16 || type == Type::bfloat16) return 2;
  return type == Type::int64 ? 8 : type == Type::float32 ? 4 : 1;
}

using Sizes = std::vector<int64_t>;

// Returns the number of elements of a shape. Raises Refused above 2^40, which no step needs.
inline int64_t count_of(const Sizes &shape) {
  __int128 count = 1;
  for (const int64_t size : shape) {
    require(size >= 0 && count * size <= int64_t{1} << 40, "a tensor is too large");
    count *= size;
  }
  return static_cast<int64_t>(count);
}

struct Tensor {
  Type type = Type::float32;
  Sizes shape = {};
  uint8_t *data = nullptr;
  std::shared_ptr<uint8_t[]> owner = nullptr;  // null for mapped memory

  int64_t rank() const { return static_cast<int64_t>(shape.size()); }
  int64_t count() const { return count_of(shape); }
  int64_t last() const { return shape.back(); }
  template <class Number> Number *as() const { return reinterpret_cast<Number *>(data); }
};

// Returns an uninitialised tensor. A register's bytes follow it, because kernels that read the cache may read them.
inline Tensor empty(Type type, const Sizes &shape) {
  constexpr std::align_val_t ALIGNMENT{64};
  void *memory = operator new(count_of(shape) * bytes_of(type) + 64, ALIGNMENT);
  std::shared_ptr<uint8_t[]> owner(static_cast<uint8_t *>(memory), [](uint8_t *at) { operator delete(at, ALIGNMENT); });
  return {type, shape, owner.get(), owner};
}
