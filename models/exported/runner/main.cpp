// Runs a model of task=export without Python. Input: texts or token ids; output: the same as of run.py predict.
#include <iostream>
#include <malloc.h>
#include <sstream>
#include <sys/syscall.h>

#include "detokenizer.h"
#include "kernels.h"
#include "model.h"

namespace {

constexpr const char *USAGE =
    "usage: quintet-runner FOLDER [decode.max_new_tokens=256] [decode.temperature=0] [decode.top_k=0] [decode.top_p=1] [decode.min_p=0]\n"
    "                      [decode.seed=N] [decode.ignore_eos=false] [device.threads=N] [tokenize=false] [input=ids] [prompt=TEXT | ID ...]\n"
    "FOLDER is what task=export wrote. Without a prompt, each line of the input is a prompt: token ids (input=ids), a text (input=text), or\n"
    "a JSON string (input=json). Each line of the output has the new token ids or the new text, as a JSON string for input=json.\n"
    "tokenize=true writes the token ids of texts, and does not run the model. The runner has no chat templates: give conversations as text.\n";
constexpr const char *TOKENIZER = "/runner_tokenizer.json";
enum class Input { ids, text, json };
constexpr int64_t DEFAULT_MAX_NEW_TOKENS = 256;  // or less if the context length leaves less

template <class Number> Number parse(const std::string &name, const std::string &text, Number least, Number most) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  std::ostringstream otherwise;
  otherwise << name << "=" << text << " is not allowed: give a number from " << least << " to " << most;
  require(error == std::errc() && end == text.data() + text.size() && number >= least && number <= most, otherwise.str());
  return number;
}

struct Settings {
  std::optional<int64_t> max_new_tokens;
  std::optional<uint64_t> seed;
  double temperature = 0, top_p = 1, min_p = 0;
  int64_t top_k = 0;
  bool ignore_eos = false, tokenize = false;
  std::optional<Input> input;
  std::optional<std::string> prompt;
  int32_t threads = 0;  // 0: one per physical core

  void set(const std::string &name, const std::string &text) {
    if (name == "decode.max_new_tokens") return void(max_new_tokens = parse<int64_t>(name, text, 1, INT32_MAX));
    if (name == "decode.temperature") return void(temperature = parse<double>(name, text, 0, 1e9));
    if (name == "decode.top_k") return void(top_k = parse<int64_t>(name, text, 0, INT32_MAX));
    if (name == "decode.top_p") return void(top_p = parse<double>(name, text, 1e-9, 1));
    if (name == "decode.min_p") return void(min_p = parse<double>(name, text, 0, 1));
    if (name == "decode.seed") return void(seed = parse<uint64_t>(name, text, 0, UINT64_MAX));
    if (name == "device.threads") return void(threads = parse<int32_t>(name, text, 1, 4096));
    if (name == "prompt") return void(prompt = text);
    const std::string setting = name + "=" + text;
    if (name == "input") {
      require(text == "ids" || text == "text" || text == "json", setting + " is not allowed: give ids, text or json");
      return void(input = text == "ids" ? Input::ids : text == "text" ? Input::text : Input::json);
    }
    require(name == "decode.ignore_eos" || name == "tokenize", setting + " is not a setting of the runner: quintet-runner --help lists the settings");
    require(text == "true" || text == "false", setting + " is not allowed: give true or false");
    (name == "tokenize" ? tokenize : ignore_eos) = text == "true";
  }
};

// Returns number `step` in [0, 1) of the seed's stream, as in pipelines/engine/sampler.py (SplitMix64).
double uniform(uint64_t seed, uint64_t step) {
  const auto mix = [](uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    return x ^ x >> 31;
  };
  return static_cast<double>(mix(mix(seed) + (step + 1) * 0x9E3779B97F4A7C15) >> 12) / 0x1p52;
}

// Returns the next token for logits [1, V].
int64_t choose(const Tensor &logits, const Settings &settings, int64_t step) {
  const Dtype dtype = dtype_of(logits.type);
  bool are_finite = false;
  int64_t token = 0;
  call_kernel("all_finite", logits.data, dtype, int64_t{1}, logits.last(), &are_finite);
  require(are_finite, "its logits are not finite");
  if (settings.temperature == 0) return call_kernel("most_likely", logits.data, dtype, &token, int64_t{1}, logits.last()), token;
  std::vector<float> floats(logits.last());
  read_floats(logits.data, dtype, 0, logits.last(), floats.data());
  const double parameters[5] = {settings.temperature, static_cast<double>(settings.top_k), settings.top_p, settings.min_p, uniform(*settings.seed, step)};
  call_kernel("draw", floats.data(), &parameters[0], &token, int64_t{1}, logits.last());
  require(token >= 0, "float64 cannot resolve the random number of a draw: give another decode.seed");
  return token;
}

std::vector<int64_t> read_ids(const std::string &line, int64_t vocab_size) {
  std::vector<int64_t> prompt;
  std::istringstream words(line);
  for (std::string word; words >> word;) prompt.push_back(parse<int64_t>("token id", word, 0, vocab_size - 1));
  return prompt;
}

std::vector<int64_t> read_text(const std::string &line, Input input, const Tokenizer &tokenizer) {
  const auto text = decode_utf8(input == Input::json ? parse_json(line).text() : line);
  require(text.has_value(), "the prompt is not UTF-8: convert it first");
  return tokenizer.encode(*text);
}

// Writes the output for a prompt, in the format of the prompt.
class Writer {
 public:
  // tokenizer: null for token ids.
  Writer(const Tokenizer *tokenizer, Input input, const std::vector<int64_t> &prompt) : input_(input) {
    if (tokenizer) detokenizer_.emplace(*tokenizer, prompt);
    if (input_ == Input::json) std::cout << '"';
  }
  void add(int64_t token) {
    if (detokenizer_)
      write(detokenizer_->add(token));
    else
      std::cout << (is_first_ ? "" : " ") << token << std::flush;
    is_first_ = false;
  }
  void end() {
    if (detokenizer_) write(detokenizer_->flush());
    std::cout << (input_ == Input::json ? "\"" : "") << std::endl;
  }

 private:
  Input input_;
  std::optional<Detokenizer> detokenizer_;
  bool is_first_ = true;

  void write(const std::u32string &text) {
    for (const char byte : encode_utf8(text)) {
      char escaped[7] = {byte};
      if (input_ == Input::json && (byte == '"' || byte == '\\')) std::snprintf(escaped, sizeof escaped, "\\%c", byte);
      if (input_ == Input::json && static_cast<uint8_t>(byte) < ' ') std::snprintf(escaped, sizeof escaped, "\\u%04x", byte);
      std::cout.write(escaped, std::max<size_t>(1, std::strlen(escaped)));
    }
    std::cout << std::flush;
  }
};

void generate(Model &model, std::vector<int64_t> tokens, const Settings &settings, const Tokenizer *tokenizer) {
  require(!tokens.empty(), "the prompt has no tokens");
  const int64_t most = *std::ranges::max_element(tokens), end = model.vocab_size();
  require(most < end, "the prompt has the token id " + std::to_string(most) + ", and the model's vocabulary has " + std::to_string(end) + " tokens");
  const int64_t num_prompt = tokens.size(), room = model.context_length() - num_prompt;
  const std::string context = ": the model's context length is " + std::to_string(model.context_length());
  require(room > 0, "the prompt has " + std::to_string(num_prompt) + " tokens, which leaves no room for new tokens" + context);
  const int64_t count = settings.max_new_tokens.value_or(std::min(DEFAULT_MAX_NEW_TOKENS, room));
  require(count <= room, "decode.max_new_tokens=" + std::to_string(count) + " is more than the " + std::to_string(room) + " that fit" + context);
  model.begin(num_prompt, num_prompt + count);
  Writer writer(tokenizer, *settings.input, tokens);
  for (int64_t step = 0; step < count; ++step) {
    const int64_t token = choose(model.step(tokens), settings, step);
    writer.add(token);
    if (!settings.ignore_eos && model.is_end(token)) break;
    tokens = {token};
  }
  writer.end();
}

Settings read_settings(const std::vector<std::string> &words) {
  Settings settings;
  std::string ids;
  for (size_t i = 1; i < words.size(); ++i) {
    const size_t sign = words[i].find('=');
    if (sign == std::string::npos)
      ids += words[i] + " ";
    else
      settings.set(words[i].substr(0, sign), words[i].substr(sign + 1));
  }
  require(ids.empty() || !settings.prompt, "prompt=TEXT and token ids are two prompts: give only one of them");
  require(!settings.input || (ids.empty() && !settings.prompt), "input is not used with a prompt: leave it out");
  if (!settings.input) settings.input = settings.prompt ? Input::text : Input::ids;
  if (!ids.empty()) settings.prompt = ids;
  require(!settings.tokenize || *settings.input != Input::ids, "tokenize=true needs texts: give prompt=TEXT, input=text or input=json");
  require(settings.temperature == 0 || settings.seed, "decode.temperature above 0 needs a seed: give decode.seed");
  if (settings.temperature == 0 && (settings.top_k != 0 || settings.top_p != 1 || settings.min_p != 0))
    std::cerr << "quintet-runner: decode.top_k, decode.top_p and decode.min_p are not used with decode.temperature=0" << std::endl;
  return settings;
}

void prepare_machine(const Settings &settings) {
  if (std::string_view(INSTRUCTION_SET) == "amx") {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // Linux, Documentation/arch/x86/xstate.rst
    require(syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0, "the system does not permit the runner to use AMX");
  }
  if (settings.threads) call_kernel("set_threads", settings.threads);
  // Memory of a step is kept for the next step instead of being returned to the system.
  mallopt(M_MMAP_THRESHOLD, 1 << 30), mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

void run(const std::vector<std::string> &words) {
  const Settings settings = read_settings(words);
  const auto opened = [&]<class Part>(std::optional<Part> &part, const std::string &path, const std::string &otherwise) {
    try {
      part.emplace(path);
    } catch (const Refused &error) {
      throw Refused(otherwise + error.what());
    }
  };
  std::optional<Tokenizer> tokenizer;
  std::optional<Model> model;
  if (*settings.input != Input::ids) opened(tokenizer, words[0] + TOKENIZER, words[0] + " takes only token ids, because its tokenizer cannot be used: ");
  if (!settings.tokenize) prepare_machine(settings), opened(model, words[0], words[0] + " cannot be run: ");
  const auto run_prompt = [&](const std::string &prompt) {
    const auto tokens = tokenizer ? read_text(prompt, *settings.input, *tokenizer) : read_ids(prompt, model->vocab_size());
    if (model) return generate(*model, tokens, settings, tokenizer ? &*tokenizer : nullptr);
    for (size_t i = 0; i < tokens.size(); ++i) std::cout << (i ? " " : "") << tokens[i];
    std::cout << std::endl;
  };
  const auto run_checked = [&](const std::string &prompt) {
    run_prompt(prompt);
    require(static_cast<bool>(std::cout), tokenizer ? "the text cannot be written" : "the tokens cannot be written");
  };
  if (settings.prompt) return run_checked(*settings.prompt);
  for (std::string line; std::getline(std::cin, line);) run_checked(line);
}

}  // namespace

int main(int count, char **words) {
  const std::vector<std::string> arguments(words + 1, words + count);
  if (arguments.empty() || arguments[0] == "--help") return (arguments.empty() ? std::cerr : std::cout) << USAGE, arguments.empty() ? 2 : 0;
  std::string line;
  try {
    return run(arguments), 0;
  } catch (const std::bad_alloc &) {
    line = "there is not enough memory: give a shorter prompt, or a smaller decode.max_new_tokens";
  } catch (const std::exception &error) {
    line = error.what();
  }
  constexpr size_t MOST = 400;  // limits names from files
  if (line.size() > MOST) line = line.substr(0, MOST) + "...";
  for (char &character : line)
    if (static_cast<unsigned char>(character) < ' ' || character == 127) character = '?';
  std::cerr << "quintet-runner: " << line << std::endl;
  return 1;
}
