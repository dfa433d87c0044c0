// Sampling (sampler.h). The distribution is taken from its most likely end, token by token, so that a vocabulary is seldom sorted.
#include "qforge/sampler.h"

#include <algorithm>
#include <cmath>

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
    float most[kLanes];
    for (float &m : most) m = logits[0];
    int64_t i = 0;
    for (; i + kLanes <= vocabulary; i += kLanes)
        for (int j = 0; j < kLanes; ++j) most[j] = logits[i + j] > most[j] ? logits[i + j] : most[j];
    float largest = *std::max_element(most, most + kLanes);
    for (; i < vocabulary; ++i) largest = std::max(largest, logits[i]);
    const float *found = std::find(logits, logits + vocabulary, largest);
    return found == logits + vocabulary ? 0 : found - logits;
}

int64_t draw(const float *logits, int64_t vocabulary, const Sampling &s, std::vector<Candidate> &room) {
    if (s.temperature == 0) return most_likely(logits, vocabulary);
    room.resize(static_cast<size_t>(vocabulary));
    for (int64_t i = 0; i < vocabulary; ++i) room[i] = {logits[i], static_cast<int32_t>(i)};
    auto end = room.end();
    if (s.top_k > 0 && s.top_k < vocabulary) {
        end = room.begin() + s.top_k;
        std::nth_element(room.begin(), end - 1, room.end(), [](const Candidate &a, const Candidate &b) { return after(b, a); });
    }
    const double largest = logits[most_likely(logits, vocabulary)];
    const auto weight = [&](const Candidate &c) { return std::exp((static_cast<double>(c.logit) - largest) / s.temperature); };
    double total = 0;
    for (auto c = room.begin(); c != end; ++c) total += weight(*c);
    // Sorted only as far as is needed: first to where the filters end, of which the sum is needed; then the draw falls on one of these.
    std::make_heap(room.begin(), end, after);
    const double number = uniform(s.seed, static_cast<uint64_t>(s.position));
    const bool all = s.top_p >= 1 && s.min_p <= 0;
    double kept = 0;
    auto rest = end;
    while (rest != room.begin()) {
        const double w = weight(room.front());
        if (kept > 0 && (kept >= s.top_p * total || w < s.min_p)) break;
        if (all && kept + w > number * total) return room.front().token;
        kept += w;
        std::pop_heap(room.begin(), rest--, after);
    }
    double passed = 0;
    for (auto c = end; c != rest;) {  // the heap's tail holds them, the most likely one last
        passed += weight(*--c);
        if (passed > number * kept) return c->token;
    }
    return rest->token;
}

}  // namespace qforge
