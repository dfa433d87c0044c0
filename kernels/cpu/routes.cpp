// Routes of decoder.h: which experts compute which rows.
#include <algorithm>
#include <cmath>
#include <limits>

#include "qforge/decoder.h"

namespace qforge {

void Routes::reserve(int64_t rows, int64_t active) { chosen_.resize(static_cast<size_t>(rows * active)); }

// Softmax over all experts, as transformers' routers have it (qwen3_moe, mixtral), in double precision: a row's choice does not depend on what the compiler makes of a loop.
void Routes::route(const float *logits, int64_t row, int64_t experts, int64_t active, bool normalized) {
    constexpr float kLowest = -std::numeric_limits<float>::infinity();
    const auto key = [&](int64_t e) { return std::isnan(logits[e]) ? kLowest : logits[e]; };  // the sum is not a number then, whichever are chosen
    Choice *found = chosen_.data() + row * active;
    for (int64_t e = 0, held = 0; e < experts; ++e) {
        if (held == active && !(key(e) > key(found[active - 1].expert))) continue;
        int64_t at = held < active ? held++ : active - 1;
        for (; at > 0 && key(e) > key(found[at - 1].expert); --at) found[at] = found[at - 1];
        found[at].expert = e;
    }
    const double largest = logits[found[0].expert];
    double sum = 0;
    for (int64_t e = 0; e < experts; ++e) sum += normalized ? 0.0 * logits[e] : std::exp(logits[e] - largest);  // 0 but for what is not finite
    if (normalized)
        for (int64_t i = 0; i < active; ++i) sum += std::exp(logits[found[i].expert] - largest);
    for (int64_t i = 0; i < active; ++i) found[i].weight = static_cast<float>(std::exp(logits[found[i].expert] - largest) / sum);
}

void Routes::sort(int64_t rows, int64_t experts, int64_t active) {
    const auto all = static_cast<size_t>(rows * active);
    std::vector<size_t> ends(static_cast<size_t>(experts), 0);  // of each expert's places, once all before it are counted
    for (size_t i = 0; i < all; ++i) ++ends[static_cast<size_t>(chosen_[i].expert)];
    groups_.clear();
    size_t place = 0;
    for (int64_t e = 0; e < experts; ++e) {
        const size_t first = place;
        place += ends[static_cast<size_t>(e)];
        if (place > first) groups_.push_back({e, static_cast<int64_t>(first), static_cast<int64_t>(place)});
        ends[static_cast<size_t>(e)] = first;
    }
    rows_.resize(all);
    shares_.resize(all);
    for (int64_t r = 0; r < rows; ++r) {
        Choice *begin = chosen_.data() + r * active, *end = begin + active;
        std::sort(begin, end, [](const Choice &a, const Choice &b) { return a.expert < b.expert; });
        for (const Choice *c = begin; c != end; ++c) {
            const size_t at = ends[static_cast<size_t>(c->expert)]++;
            rows_[at] = r;
            shares_[static_cast<size_t>(r * active + (c - begin))] = {static_cast<int64_t>(at), c->weight};
        }
    }
}

}  // namespace qforge
