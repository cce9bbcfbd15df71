// Prints the logits of an export as the C++ runner computes them: runner_logits FOLDER PROMPT_LENGTH NUM_TOKENS.
// A line of the input is the token ids of a step. A line of the output is the bits of the step's logits as float32.
#include <iostream>
#include <sstream>

#include "../../models/exported/runner/kernels.h"
#include "../../models/exported/runner/model.h"

int main(int, char **words) {
  Model model(words[1]);
  model.begin(std::stoll(words[2]), std::stoll(words[3]));
  for (std::string line; std::getline(std::cin, line);) {
    std::vector<int64_t> tokens;
    std::istringstream numbers(line);
    for (int64_t token; numbers >> token;) tokens.push_back(token);
    const Tensor logits = model.step(tokens);
    std::vector<float> floats(logits.last());
    read_floats(logits.data, dtype_of(logits.type), 0, logits.last(), floats.data());
    for (const float number : floats) std::cout << std::bit_cast<int32_t>(number) << ' ';
    std::cout << std::endl;
  }
}
