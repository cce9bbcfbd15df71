// The files of an exported model (docs/export.md), memory-mapped.
#pragma once

#include <cstring>
#include <fcntl.h>
#include <map>
#include <optional>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "json.h"

// Maps a file until the process ends. Raises Refused if it cannot be read.
inline std::string_view map_file(const std::string &path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // O_NONBLOCK: reject a pipe instead of waiting for it
  struct stat status;
  require(file >= 0 && fstat(file, &status) == 0, path + " cannot be read (" + std::strerror(errno) + ")");
  require(S_ISREG(status.st_mode), path + " is not a file");
  void *bytes = status.st_size ? mmap(nullptr, status.st_size, PROT_READ, MAP_PRIVATE, file, 0) : nullptr;
  close(file);
  require(bytes != MAP_FAILED, path + " cannot be mapped (" + std::strerror(errno) + ")");
  return {static_cast<const char *>(bytes), static_cast<size_t>(status.st_size)};
}

inline std::string_view part(std::string_view bytes, uint64_t start, uint64_t length) {
  require(start <= bytes.size() && length <= bytes.size() - start, "it ends too early");
  return bytes.substr(start, length);
}

template <class Number> Number number_at(std::string_view bytes, uint64_t place) {
  Number number;
  std::memcpy(&number, part(bytes, place, sizeof number).data(), sizeof number);
  return number;
}

inline uint32_t crc32(std::string_view bytes) {
  uint32_t table[256], crc = ~0u;
  for (uint32_t i = 0; i < 256; ++i) {
    table[i] = i;
    for (int bit = 0; bit < 8; ++bit) table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0xedb88320 : 0);
  }
  for (const uint8_t byte : bytes) crc = crc >> 8 ^ table[(crc ^ byte) & 255];
  return ~crc;
}

// Returns the JSON of a PT2 archive's graph: the only stored entry of the zip file (APPNOTE 6.3) whose name ends with
// /models/model.json.
inline Json read_graph(std::string_view zip) {
  const auto expect = [](bool holds) { require(holds, "it is not an archive of uncompressed files"); };
  const size_t end = zip.rfind(std::string_view("PK\5\6"));
  expect(end != zip.npos);
  uint64_t at = number_at<uint32_t>(zip, end + 16);
  std::optional<std::string_view> graph;
  for (int left = number_at<uint16_t>(zip, end + 10); left > 0; --left) {
    expect(part(zip, at, 4) == "PK\1\2");
    const uint16_t name_length = number_at<uint16_t>(zip, at + 28);
    if (part(zip, at + 46, name_length).ends_with("/models/model.json")) {
      const uint32_t size = number_at<uint32_t>(zip, at + 24), local = number_at<uint32_t>(zip, at + 42);
      expect(!graph && number_at<uint16_t>(zip, at + 10) == 0 && number_at<uint32_t>(zip, at + 20) == size && part(zip, local, 4) == "PK\3\4");
      graph = part(zip, local + uint64_t{30} + number_at<uint16_t>(zip, local + 26) + number_at<uint16_t>(zip, local + 28), size);
      require(crc32(*graph) == number_at<uint32_t>(zip, at + 16), "the checksum of its graph is wrong");
    }
    at += 46 + name_length + number_at<uint16_t>(zip, at + 30) + number_at<uint16_t>(zip, at + 32);
  }
  require(graph.has_value(), "it holds no graph");
  return parse_json(*graph)["graph_module"]["graph"];
}

// Returns the tensors of a safetensors file by name, memory-mapped.
inline std::map<std::string, Tensor> read_weights(std::string_view file) {
  static const std::map<std::string, Type> TYPES = {{"U8", Type::uint8},    {"I8", Type::int8},     {"I64", Type::int64},
                                                    {"F16", Type::float16}, {"F32", Type::float32}, {"BF16", Type::bfloat16}};
  const uint64_t header = number_at<uint64_t>(file, 0);
  const Json described = parse_json(part(file, 8, header));
  const auto content = file.substr(8 + header);
  std::map<std::string, Tensor> weights;
  for (const auto &[name, entry] : described.object()) {
    if (name == "__metadata__") continue;
    const auto type = TYPES.find(entry["dtype"].text());
    require(type != TYPES.end(), "weights of dtype " + entry["dtype"].text() + " are not supported");
    Tensor weight{type->second, integers(entry["shape"])};
    const Sizes offsets = integers(entry["data_offsets"]);
    require(offsets.size() == 2 && offsets[0] >= 0 && offsets[1] >= offsets[0], name + " has no valid data_offsets");
    const auto bytes = part(content, offsets[0], offsets[1] - offsets[0]);
    require(static_cast<int64_t>(bytes.size()) == weight.count() * bytes_of(weight.type), name + " has a size that does not fit its shape");
    require(reinterpret_cast<uintptr_t>(bytes.data()) % bytes_of(weight.type) == 0, name + " is not aligned");
    weight.data = reinterpret_cast<uint8_t *>(const_cast<char *>(bytes.data()));
    require(weights.emplace(name, std::move(weight)).second, name + " occurs twice");
  }
  return weights;
}
