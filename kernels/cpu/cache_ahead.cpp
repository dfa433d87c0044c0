#include "qforge/cache_ahead.h"

#include <algorithm>

namespace qforge {
namespace {

struct Blocks {
    int64_t first, end;
};

// What a sequence's only query sees
Blocks blocks_of(const Attention &a, int64_t query, int64_t query_end) {
    if (query_end - query != 1) return {0, 0};
    const int64_t oldest = a.window ? a.positions[query] - a.window + 1 : 0;
    return {std::max<int64_t>(oldest, 0) / a.cache.block_size, a.positions[query] / a.cache.block_size + 1};
}

}  // namespace

CacheAhead::CacheAhead(const Attention &a, const int32_t *query_starts, int64_t sequence, int64_t sequence_end, int64_t products)
    : a_(a), query_starts_(query_starts), sequence_(sequence), sequence_end_(sequence_end) {
    int64_t blocks = 0;
    for (int64_t s = sequence; s < sequence_end; ++s) {
        const Blocks seen = blocks_of(a, query_starts[s], query_starts[s + 1]);
        blocks += seen.end - seen.first;
    }
    rate_ = products ? static_cast<int64_t>(static_cast<double>(kLine) * static_cast<double>(blocks * a.cache.layer_bytes() / 64) / static_cast<double>(products)) : 0;
}

bool CacheAhead::next_block() {
    while (block_ == block_end_) {
        if (sequence_ == sequence_end_) {
            rate_ = due_ = 0;
            return false;
        }
        const Blocks seen = blocks_of(a_, query_starts_[sequence_], query_starts_[sequence_ + 1]);
        block_ = seen.first;
        block_end_ = seen.end;
        ++sequence_;
    }
    next_ = a_.cache.memory + a_.block_tables[(sequence_ - 1) * a_.table_stride + block_++] * a_.cache.block_bytes;
    end_ = next_ + a_.cache.layer_bytes() / 64 * 64;
    return true;
}

}  // namespace qforge
