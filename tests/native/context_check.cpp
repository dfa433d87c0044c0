// A build for one kind of processor: it runs the instruction sets that are named, and products through Context have the same bits on each.   context_check FIRST_SEED COUNT NAME,NAME
#include <cstdio>
#include <string>
#include <vector>

#include "blockwise_case.h"
#include "qforge/context.h"
#include "seeds.h"

using namespace qforge;

namespace {

// With activations rounded, and as they are
std::vector<float> products(const BlockwiseCase &c, const std::string &isa, int threads) {
    const auto size = static_cast<size_t>(c.rows * c.w.columns);
    std::vector<float> y(2 * size, -1.0f);
    Context context(threads, isa);
    Weight floats = c.w;
    floats.activations = Activations::F32;
    floats.scales = c.scales.data();
    floats.half_scales = nullptr;
    context.linear(c.w, c.x.data(), c.rows, c.w.inputs(), y.data(), c.w.columns);
    context.linear(floats, c.x.data(), c.rows, c.w.inputs(), y.data() + size, c.w.columns);
    return y;
}

bool same(unsigned seed) {
    const BlockwiseCase c(seed);
    const std::vector<float> wanted = products(c, "portable", 1);
    bool all = true;
    for (const std::string &isa : Context::instruction_sets()) all = c.same(seed, wanted, products(c, isa, 2)) && all;
    return all;
}

}  // namespace

int main(int, char **given) {
    std::string names;
    for (const std::string &isa : Context::instruction_sets()) names += (names.empty() ? "" : ",") + isa;
    if (names != given[3]) {
        std::printf("this build runs %s\n", names.c_str());
        return 1;
    }
    return all_the_same(given, same);
}
