// Sampling (sampler.h). The distribution is taken from its most likely end, token by token, so that a vocabulary is seldom sorted, and seldom more of it than what is near that end.
#include "qforge/sampler.h"

#include <algorithm>
#include <cmath>

#include "weights.inl"

namespace qforge {
namespace {

// less likely, or as likely and later in the vocabulary: the order of a heap whose top is the most likely token
bool after(const Candidate &a, const Candidate &b) { return a.logit < b.logit || (a.logit == b.logit && a.token > b.token); }

struct Word {
    uint64_t high, low;
};

Word multiply(uint64_t a, uint64_t b) {
    const auto product = static_cast<unsigned __int128>(a) * b;
    return {static_cast<uint64_t>(product >> 64), static_cast<uint64_t>(product)};
}

constexpr double kNear[] = {3, 8};  // tokens less likely than the first by e^3 are looked at where the others do not decide, those by e^8 where these do not, either

// Logits to weights, of which the largest is 1.
struct Weighing {
    double largest, inverse;  // of the temperature

    double operator()(float logit) const { return power((static_cast<double>(logit) - largest) * inverse); }
};

void gather(const float *logits, int64_t vocabulary, float above, std::vector<Candidate> &room) {
    room.clear();
    for (int64_t start = 0; start < vocabulary; start += kTogether) {
        const int64_t end = std::min(start + kTogether, vocabulary);
        int count = 0;
        for (int64_t i = start; i < end; ++i) count += logits[i] > above;
        if (count == 0) continue;
        for (int64_t i = start; i < end; ++i)
            if (logits[i] > above) room.push_back({logits[i], static_cast<int32_t>(i)});
    }
}

void gather_all(const float *logits, int64_t vocabulary, std::vector<Candidate> &room) {
    room.resize(static_cast<size_t>(vocabulary));
    for (int64_t i = 0; i < vocabulary; ++i) room[i] = {logits[i], static_cast<int32_t>(i)};
}

// One of some tokens, or -1 where these do not decide: there are others, all less likely. `total`: the weight of all tokens, those among them.
int64_t draw_of(std::vector<Candidate> &room, bool complete, double total, const Weighing &weight, const Sampling &s) {
    auto end = room.end();
    if (s.top_k > 0 && s.top_k < static_cast<int64_t>(room.size())) {
        end = room.begin() + s.top_k;
        std::nth_element(room.begin(), end - 1, room.end(), [](const Candidate &a, const Candidate &b) { return after(b, a); });
    }
    if (s.top_k > 0) {
        complete = complete || end - room.begin() == s.top_k;
        total = 0;
        for (auto c = room.begin(); c != end; ++c) total += weight(c->logit);
        if (!complete) return -1;
    }
    // Sorted only as far as is needed: first to where the filters end, of which the sum is needed; then the draw falls on one of these.
    std::make_heap(room.begin(), end, after);
    const double number = uniform(s.seed, static_cast<uint64_t>(s.position));
    const bool all = s.top_p >= 1 && s.min_p <= 0;
    bool decided = complete;
    double kept = 0;
    auto rest = end;
    while (rest != room.begin()) {
        const double w = weight(room.front().logit);
        if (kept > 0 && (kept >= s.top_p * total || w < s.min_p)) {
            decided = true;
            break;
        }
        if (all && kept + w > number * total) return room.front().token;
        kept += w;
        std::pop_heap(room.begin(), rest--, after);
    }
    if (!decided) return -1;
    double passed = 0;
    for (auto c = end; c != rest;) {  // the heap's tail holds them, the most likely one last
        passed += weight((--c)->logit);
        if (passed > number * kept) return c->token;
    }
    return rest->token;
}

}  // namespace

double uniform(uint64_t seed, uint64_t position) {
    uint64_t counter[4] = {1, position, 0, 0}, key[2] = {seed, 0};
    for (int round = 0; round < 10; ++round) {
        const Word a = multiply(0xD2E7470EE14C6C93u, counter[0]), b = multiply(0xCA5A826395121157u, counter[2]);
        const uint64_t next[4] = {b.high ^ counter[1] ^ key[0], b.low, a.high ^ counter[3] ^ key[1], a.low};
        std::copy(next, next + 4, counter);
        key[0] += 0x9E3779B97F4A7C15u;
        key[1] += 0xBB67AE8584CAA73Bu;
    }
    return static_cast<double>(counter[0] >> 11) * 0x1p-53;
}

int64_t most_likely(const float *logits, int64_t vocabulary) {
    constexpr int kLanes = 16;  // independent maxima, which the compiler keeps in registers
    constexpr int64_t kBlock = 64 * kLanes;
    float largest = logits[0];
    int64_t found = 0;  // where the block begins that has it
    for (int64_t first = 0; first < vocabulary; first += kBlock) {
        const int64_t end = std::min(first + kBlock, vocabulary);
        float most[kLanes];
        for (float &m : most) m = largest;
        int64_t i = first;
        for (; i + kLanes <= end; i += kLanes)
            for (int j = 0; j < kLanes; ++j) most[j] = logits[i + j] > most[j] ? logits[i + j] : most[j];
        float here = *std::max_element(most, most + kLanes);
        for (; i < end; ++i) here = std::max(here, logits[i]);
        if (here > largest) found = first;
        largest = std::max(largest, here);
    }
    return std::isfinite(largest) ? std::find(logits + found, logits + vocabulary, largest) - logits : -1;
}

double weight_sum_portable(const float *logits, int64_t n, double largest, double inverse) { return sum_of_weights(logits, n, largest, inverse); }

int64_t draw(const float *logits, int64_t vocabulary, const Sampling &s, std::vector<Candidate> &room, WeightSum sum) {
    const int64_t first = most_likely(logits, vocabulary);
    if (first < 0 || s.temperature == 0) return first;
    const Weighing weight{logits[first], 1 / s.temperature};
    const double total = s.top_k > 0 ? 0 : sum(logits, vocabulary, weight.largest, weight.inverse);
    for (const double near : kNear) {
        gather(logits, vocabulary, static_cast<float>(weight.largest - near * s.temperature), room);
        const int64_t token = draw_of(room, static_cast<int64_t>(room.size()) == vocabulary, total, weight, s);
        if (token >= 0) return token;
    }
    gather_all(logits, vocabulary, room);
    return draw_of(room, true, total, weight, s);
}

}  // namespace qforge
