// How Python finds the kernels: OPERATOR declares a function with its name and the types of its arguments, and nothing is written twice. Calls
// of operators are recorded while a recording is on, to be made again all in one: Python takes longer to make 200 calls than a small model to
// compute.
#pragma once

#include <cstdint>
#include <functional>
#include <type_traits>
#include <vector>

using Recording = std::vector<std::function<void()>>;

extern thread_local Recording *recording;  // of this thread; null while nothing is recorded

// A type by a letter, as kernels/build.py reads it.
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

// A function that Python can call; all of them are a list.
struct Exported {
  const char *name, *types;  // letters of the result and of the arguments
  void (*address)();
  const Exported *next;
  static inline const Exported *first = nullptr;

  Exported(const char *name, const char *types, void (*address)()) : name(name), types(types), address(address), next(first) { first = this; }
};

template <auto FUNCTION> struct Function;
template <class Result, class... Arguments, Result (*FUNCTION)(Arguments...)> struct Function<FUNCTION> {
  static constexpr char TYPES[] = {letter<Result>(), letter<Arguments>()..., '\0'};

  // What a reference refers to is copied into the recording; what a pointer points to must stay.
  static void call_and_record(Arguments... arguments) {
    if (recording) recording->emplace_back([=] { FUNCTION(arguments...); });
    FUNCTION(arguments...);
  }
};

// OPERATOR(name, (type argument, ...)) { ... }
#define OPERATOR(name, arguments)                                                                                                \
  static void name##_operator arguments;                                                                                         \
  static const Exported name##_exported(#name, Function<&name##_operator>::TYPES,                                                \
                                        reinterpret_cast<void (*)()>(&Function<&name##_operator>::call_and_record));             \
  static void name##_operator arguments

// A function that is no operator and is never recorded: it governs threads or recordings.
#define EXPORT(name) static const Exported name##_exported(#name, Function<&name>::TYPES, reinterpret_cast<void (*)()>(&name))
