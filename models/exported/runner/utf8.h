// UTF-8 and code points.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

constexpr char32_t REPLACEMENT = 0xFFFD;  // for bytes that are not UTF-8

// Returns the character at `at` and moves `at` behind it. For invalid bytes it moves behind the bytes that could begin
// a character, or behind one byte (Unicode 15, 3.9).
inline std::optional<char32_t> next_character(std::string_view bytes, size_t &at) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  const uint8_t first = byte(at++);
  if (first < 0x80) return first;
  const int more = first >= 0xC2 && first < 0xE0 ? 1 : first >= 0xE0 && first < 0xF0 ? 2 : first >= 0xF0 && first < 0xF5 ? 3 : 0;
  if (!more) return std::nullopt;
  char32_t code = first & (0x3F >> more);
  for (int i = 0; i < more; ++i, ++at) {
    const uint8_t least = i || (first != 0xE0 && first != 0xF0) ? 0x80 : first == 0xE0 ? 0xA0 : 0x90;
    const uint8_t most = i || (first != 0xED && first != 0xF4) ? 0xBF : first == 0xED ? 0x9F : 0x8F;
    if (at == bytes.size() || byte(at) < least || byte(at) > most) return std::nullopt;
    code = code << 6 | (byte(at) & 0x3F);
  }
  return code;
}

inline std::optional<std::u32string> decode_utf8(std::string_view bytes) {
  std::u32string text;
  for (size_t at = 0; at < bytes.size();) {
    const auto code = next_character(bytes, at);
    if (!code) return std::nullopt;
    text += *code;
  }
  return text;
}

inline std::u32string decode_lossy(std::string_view bytes) {
  std::u32string text;
  for (size_t at = 0; at < bytes.size();) text += next_character(bytes, at).value_or(REPLACEMENT);
  return text;
}

inline std::string encode_utf8(std::u32string_view text) {
  std::string bytes;
  for (const char32_t code : text) {
    const int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    bytes += static_cast<char>(more ? (0x780 >> more & 0xFF) | code >> 6 * more : code);
    for (int i = more; i-- > 0;) bytes += static_cast<char>(0x80 | (code >> 6 * i & 0x3F));
  }
  return bytes;
}
