// The next token from a row of logits: the most likely one, or one drawn by temperature, top-k, top-p and min-p (transformers' order of filters).
// Random numbers are a function of (seed, position) alone: Philox 4x64 with 10 rounds (Salmon et al. 2011), as numpy's.
#pragma once

#include <cstdint>
#include <vector>

namespace qforge {

struct Sampling {  // one row's
    double temperature;  // 0: greedy
    int64_t top_k;       // 0: all
    double top_p, min_p;
    uint64_t seed;
    int64_t position;
};

struct Candidate {
    float logit;
    int32_t token;
};

// The sum of e^((logit - largest) * inverse), each at least e^-700: the same bits on each instruction set
using WeightSum = double (*)(const float *logits, int64_t n, double largest, double inverse);
double weight_sum_portable(const float *logits, int64_t n, double largest, double inverse);
double weight_sum_avx2(const float *logits, int64_t n, double largest, double inverse);
double weight_sum_avx512(const float *logits, int64_t n, double largest, double inverse);

double uniform(uint64_t seed, uint64_t position);  // [0, 1)
int64_t most_likely(const float *logits, int64_t vocabulary);  // the first of equal ones; -1 where it is not finite
// `room`: reused memory of the calling thread
int64_t draw(const float *logits, int64_t vocabulary, const Sampling &s, std::vector<Candidate> &room, WeightSum sum = weight_sum_portable);

}  // namespace qforge
