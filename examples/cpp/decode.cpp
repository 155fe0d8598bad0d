// Greedy decoding with a TorchScript artifact in C++: libtorch alone, no Python.
//
//   decode OUT NEW ID...    prints up to NEW token ids; an end-of-sequence id is the last
//
// OUT is a folder that `qopt compile --target torchscript-cpu` wrote. Its manifest lists the inputs
// in the order in which `forward` takes them.

#include <torch/script.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

int main(int argc, char** argv) try {
  if (argc < 4) throw std::invalid_argument("usage: decode OUT NEW ID...");
  const std::string out = argv[1];
  const size_t wanted = std::stoul(argv[2]);
  std::vector<int64_t> ids;
  for (int i = 3; i < argc; ++i) ids.push_back(std::stoll(argv[i]));

  std::ifstream file(out + "/qopt_manifest.json");
  if (!file) throw std::runtime_error("no qopt_manifest.json in " + out);
  const std::string manifest(std::istreambuf_iterator<char>(file), {});
  const auto numbers_in = [](const std::string& text) {
    const std::regex number("-?[0-9]+");
    std::vector<int64_t> found;
    for (std::sregex_iterator at(text.begin(), text.end(), number), end; at != end; ++at)
      found.push_back(std::stoll(at->str()));
    return found;
  };
  std::smatch found;
  std::set<int64_t> stops;
  if (std::regex_search(manifest, found, std::regex(R"re("eos_token_ids": \[([^\]]*)\])re")))
    for (int64_t id : numbers_in(found[1])) stops.insert(id);

  // One row without a past; what is a number in a shape is the model's, the rest is a run's.
  const std::map<std::string, torch::Dtype> types{
      {"float32", torch::kFloat}, {"float16", torch::kHalf}, {"bfloat16", torch::kBFloat16}};
  const std::string inputs = manifest.substr(manifest.find("\n  \"inputs\": [\n"));
  const std::regex input(
      R"re("name": "([^"]+)",\s*"dtype": "([^"]+)",\s*"shape": \[([^\]]*)\])re");
  std::vector<std::string> names;
  std::vector<torch::Tensor> past;
  const auto behind = inputs.begin() + inputs.find("\n  ],");
  for (std::sregex_iterator at(inputs.begin(), behind, input), end; at != end; ++at) {
    const std::string name = (*at)[1], shape = (*at)[3];
    if (name.rfind("past_key_values.", 0) != 0) {
      names.push_back(name);
      continue;
    }
    const auto sizes = numbers_in(shape);
    if (sizes.size() != 2 || shape.find("past_sequence_length") == std::string::npos)
      throw std::runtime_error(name + " is no cache that grows: this program knows no other");
    past.push_back(torch::zeros({1, sizes[0], 0, sizes[1]}, types.at((*at)[2])));
  }

  const torch::InferenceMode inference;
  torch::jit::Module model = torch::jit::load(out + "/model.pt");
  torch::Tensor next = torch::tensor(ids).unsqueeze(0);
  int64_t total = 0;
  for (size_t made = 0; made < wanted; ++made) {
    total += next.size(1);
    std::vector<torch::IValue> arguments;
    for (const auto& name : names) {
      if (name == "input_ids")
        arguments.emplace_back(next);
      else if (name == "attention_mask")
        arguments.emplace_back(torch::ones({1, total}, torch::kLong));
      else if (name == "position_ids")
        arguments.emplace_back(torch::arange(total - next.size(1), total).unsqueeze(0));
      else
        throw std::runtime_error("this program knows no input " + name);
    }
    arguments.insert(arguments.end(), past.begin(), past.end());
    const auto results = model.forward(arguments).toTuple()->elements().vec();
    for (size_t i = 0; i < past.size(); ++i) past[i] = results[i + 1].toTensor();
    next = results[0].toTensor().select(1, -1).argmax(-1, /*keepdim=*/true);
    std::cout << (made ? " " : "") << next.item<int64_t>();
    if (stops.count(next.item<int64_t>())) break;
  }
  std::cout << std::endl;
} catch (const std::exception& error) {
  std::cerr << "decode: " << error.what() << std::endl;
  return 1;
}
