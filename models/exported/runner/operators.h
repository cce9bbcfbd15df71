// Checks that the functions of operators.cpp and products.cpp share, and the functions of products.cpp.
#pragma once

#include "graph.h"
#include "kernels.h"

inline constexpr void *NONE = nullptr;

inline void require_fit(bool holds) { require(holds, "its arguments do not have the expected shapes and types"); }

inline bool is_of(const Tensor &x, Type type, const Sizes &shape) { return x.type == type && x.shape == shape; }

inline bool is_integers(const Tensor &x, int64_t rank) { return x.type == Type::int64 && x.rank() == rank; }

// Returns the tensor, after a check of its type and shape. A missing tensor has no address.
inline Tensor checked_tensor(const Tensor *x, Type type, const Sizes &shape) {
  require_fit(!x || is_of(*x, type, shape));
  return x ? *x : Tensor();
}

// Checks integers that are used as indices of an axis of `size`.
inline void require_indices(const Tensor &numbers, int64_t size) {
  for (int64_t i = 0; i < numbers.count(); ++i) {
    const int64_t index = numbers.as<int64_t>()[i];
    require(index >= 0 && index < size, "index " + std::to_string(index) + " of an axis of " + std::to_string(size));
  }
}

inline Tensor like(const Tensor &x) { return empty(x.type, x.shape); }

void matmul_together(Step &step);
void matmul_swiglu(Step &step);
void linear(Step &step);
void take_rows(Step &step);
void matmul_per_head(Step &step);
void grouped_matmul(Step &step);
void route(Step &step);
void route_corrected(Step &step);
void group_rows(Step &step);
void combine_rows(Step &step);
