// Makes the kernels available to Python: OPERATOR exports a function with its name and the types of its arguments.
// Between begin_recording and end_recording calls of operators are recorded, and one call replays all of them. Python
// takes longer to issue the 200 calls of a decode step than a small model takes to compute them.
#pragma once

#include <cstdint>
#include <functional>
#include <type_traits>
#include <vector>

#include "threads.h"

struct Recording {
  std::vector<std::function<void()>> calls;
  std::vector<MemoryRange> reads;  // of weights, by all calls in order
  std::vector<int64_t> num_reads;  // per call: the number of `reads` up to and including this call
};

extern thread_local Recording *recording;  // of this thread; null if nothing is recorded

// The letter of an argument's type. kernels/build.py maps it to a ctypes type.
template <class T> constexpr char letter() {
  if constexpr (std::is_enum_v<T>)
    return letter<std::underlying_type_t<T>>();
  else if constexpr (std::is_pointer_v<T> || std::is_reference_v<T>)
    return 'P';
  else if constexpr (std::is_same_v<T, int64_t>)
    return 'q';
  else if constexpr (std::is_same_v<T, int32_t>)
    return 'i';
  else if constexpr (std::is_same_v<T, float>)
    return 'f';
  else if constexpr (std::is_same_v<T, bool>)
    return '?';
  else {
    static_assert(std::is_void_v<T>, "Python cannot pass an argument of this type");
    return 'v';
  }
}

// A function that Python can call; a node of a linked list of all of them.
struct Exported {
  const char *name, *types;  // types: letters of the result and of the arguments
  void (*address)();
  const Exported *next;
  static inline const Exported *first = nullptr;

  Exported(const char *name, const char *types, void (*address)()) : name(name), types(types), address(address), next(first) { first = this; }
};

template <auto FUNCTION> struct Function;
template <class Result, class... Arguments, Result (*FUNCTION)(Arguments...)> struct Function<FUNCTION> {
  static constexpr char TYPES[] = {letter<Result>(), letter<Arguments>()..., '\0'};

  // Referenced objects are copied into the recording. Memory behind pointers must stay valid.
  static void call_and_record(Arguments... arguments) {
    FUNCTION(arguments...);
    if (!recording) return;
    recording->calls.emplace_back([=] { FUNCTION(arguments...); });
    recording->num_reads.push_back(recording->reads.size());
  }
};

// Usage: OPERATOR(name, (type argument, ...)) { ... }
#define OPERATOR(name, arguments)                                                                                                \
  static void name##_operator arguments;                                                                                         \
  static const Exported name##_exported(#name, Function<&name##_operator>::TYPES,                                                \
                                        reinterpret_cast<void (*)()>(&Function<&name##_operator>::call_and_record));             \
  static void name##_operator arguments

// Exports a function that is never recorded, because it controls threads or recordings.
#define EXPORT(name) static const Exported name##_exported(#name, Function<&name>::TYPES, reinterpret_cast<void (*)()>(&name))
