// JSON (RFC 8259) as values. Files are not trusted: invalid JSON, or a value of another type than requested, raises
// Refused.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>
#include <utility>
#include <variant>

#include "tensor.h"
#include "utf8.h"

struct Json {
  using List = std::vector<Json>;
  using Object = std::vector<std::pair<std::string, Json>>;
  // size_t: the index of a value of a step (graph.h). It does not occur in JSON text.
  std::variant<std::nullptr_t, bool, int64_t, double, std::string, List, Object, size_t> value;

  bool is_null() const { return std::holds_alternative<std::nullptr_t>(value); }
  bool is_list() const { return std::holds_alternative<List>(value); }
  bool is_tensor() const { return std::holds_alternative<size_t>(value); }
  bool flag() const { return as<bool>("true or false"); }
  int64_t integer() const { return as<int64_t>("a whole number"); }
  double number() const { return std::holds_alternative<int64_t>(value) ? static_cast<double>(integer()) : as<double>("a number"); }
  const std::string &text() const { return as<std::string>("a text"); }
  const List &list() const { return as<List>("a list"); }
  const Object &object() const { return as<Object>("an object"); }
  size_t tensor() const { return as<size_t>("a tensor"); }

  // Returns null if there is no such name.
  static const Json *find(const Object &object, std::string_view name) {
    const auto entry = std::ranges::find(object, name, &Object::value_type::first);
    return entry == object.end() ? nullptr : &entry->second;
  }
  const Json &operator[](std::string_view name) const {
    if (const Json *entry = find(object(), name)) return *entry;
    throw Refused("it has no '" + std::string(name) + "'");
  }

 private:
  template <class Kind> const Kind &as(const char *kind) const {
    const Kind *content = std::get_if<Kind>(&value);
    require(content, std::string("a value is not ") + kind);
    return *content;
  }
};

class JsonParser {
 public:
  explicit JsonParser(std::string_view text) : at_(text.data()), end_(at_ + text.size()) {}

  Json document() {
    Json root = value(0);
    expect(next() == '\0' && at_ == end_);
    return root;
  }

 private:
  static constexpr int MAX_DEPTH = 64;  // of nested lists and objects; a graph has 12
  const char *at_, *end_;

  static void expect(bool holds) { require(holds, "it is not JSON"); }

  // Returns the next character that is not white space, '\0' at the end.
  char next() {
    while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) ++at_;
    return at_ == end_ ? '\0' : *at_;
  }
  void take(std::string_view word) {
    next();
    expect(std::string_view(at_, end_).starts_with(word));
    at_ += word.size();
  }

  Json value(int depth) {
    Json::Object object;
    Json::List list;
    expect(depth < MAX_DEPTH);
    switch (next()) {
      case '{':
        items("{", "}", [&] { object.emplace_back(text(), Json{}), take(":"), object.back().second = value(depth + 1); });
        return {std::move(object)};
      case '[': return items("[", "]", [&] { list.push_back(value(depth + 1)); }), Json{std::move(list)};
      case '"': return {text()};
      case 't': return take("true"), Json{true};
      case 'f': return take("false"), Json{false};
      case 'n': return take("null"), Json{nullptr};
      default: return number();
    }
  }
  template <class Item> void items(std::string_view open, std::string_view close, const Item &item) {
    take(open);
    if (next() != close[0]) do
        item();
      while (next() == ',' && ++at_);
    take(close);
  }
  Json number() {
    int64_t integer;
    double floating;
    const auto [end, error] = std::from_chars(at_, end_, integer);
    if (error == std::errc() && (end == end_ || (*end != '.' && *end != 'e' && *end != 'E'))) return at_ = end, Json{integer};
    const auto [end_of_float, float_error] = std::from_chars(at_, end_, floating);
    expect(float_error == std::errc() && std::isfinite(floating));  // from_chars also accepts inf and nan
    return at_ = end_of_float, Json{floating};
  }
  std::string text() {
    constexpr std::string_view ESCAPED = "\"\\/bfnrt", CHARACTERS = "\"\\/\b\f\n\r\t";
    std::string text;
    for (take("\""); at_ != end_ && *at_ != '"'; ++at_) {
      if (*at_ != '\\') {
        text += *at_;
        continue;
      }
      expect(++at_ != end_);
      const size_t escaped = ESCAPED.find(*at_);
      expect(escaped != ESCAPED.npos || *at_ == 'u');
      text += *at_ == 'u' ? encode_utf8(std::u32string(1, code_point())) : std::string(1, CHARACTERS[escaped]);
    }
    expect(at_ != end_), ++at_;
    return text;
  }
  // Returns the code point of the escape whose `u` is at `at_`, or of a surrogate pair of escapes. `at_` moves to the
  // last digit.
  char32_t code_point() {
    char32_t code = digits();
    if (code >= 0xD800 && code < 0xDC00) {
      expect(end_ - at_ > 2 && at_[1] == '\\' && at_[2] == 'u'), at_ += 2;
      const char32_t second = digits();
      expect(second >= 0xDC00 && second < 0xE000);
      return 0x10000 + (code - 0xD800) * 0x400 + second - 0xDC00;
    }
    expect(code < 0xDC00 || code > 0xDFFF);
    return code;
  }
  uint16_t digits() {
    uint16_t number = 0;
    expect(end_ - at_ > 4 && std::from_chars(at_ + 1, at_ + 5, number, 16).ptr == at_ + 5);
    return at_ += 4, number;
  }
};

inline Json parse_json(std::string_view text) { return JsonParser(text).document(); }

// Returns a text as code points. Raises Refused if it is not UTF-8.
inline std::u32string characters(const Json &json) {
  const auto text = decode_utf8(json.text());
  require(text.has_value(), "a text is not UTF-8");
  return *text;
}

// Returns the numbers of a list, for example a shape.
inline Sizes integers(const Json &json) {
  Sizes numbers;
  for (const Json &item : json.list()) numbers.push_back(item.integer());
  return numbers;
}
