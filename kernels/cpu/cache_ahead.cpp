#include "qforge/cache_ahead.h"

namespace qforge {

CacheAhead::CacheAhead(const Attention &a, const int32_t *query_starts, int64_t sequence, int64_t sequence_end, int64_t products)
    : a_(a), query_starts_(query_starts), sequence_(sequence), sequence_end_(sequence_end) {
    int64_t blocks = 0;
    for (int64_t s = sequence; s < sequence_end; ++s) {
        const Blocks seen = blocks_of(a, query_starts[s], query_starts[s + 1]);
        blocks += seen.end - seen.first;
    }
    rate_ = products ? static_cast<int64_t>(static_cast<double>(kLine) * static_cast<double>(blocks * a.cache.layer_bytes() / 64) / static_cast<double>(products)) : 0;
}

}  // namespace qforge
