// The sum of weights of sampler.h for AVX-512 (compiled with that flag; called only where CPUID has it).
#include "weights.inl"

namespace qforge {

double weight_sum_avx512(const float *logits, int64_t n, double largest, double inverse) { return sum_of_weights(logits, n, largest, inverse); }

}  // namespace qforge
