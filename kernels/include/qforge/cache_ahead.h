// The keys and values that the next attention will read, brought nearer by threads that multiply meanwhile: memory rests while a product of many rows computes.
#pragma once

#include <cstdint>

#include "qforge/layers.h"

namespace qforge {

// One thread's part: the blocks of some sequences that decode one token, one line after the other. Queries of a prompt read each key so often that they hardly wait.
class alignas(64) CacheAhead {
  public:
    CacheAhead() = default;  // nothing
    // Of sequences [sequence, sequence_end) of a step, spread over `products`, the multiplications of this thread until then
    CacheAhead(const Attention &a, const int32_t *query_starts, int64_t sequence, int64_t sequence_end, int64_t products);

    bool left() const { return rate_ != 0; }
    // So many multiplications are about to be done
    void fetch(int64_t products) {
        for (due_ += products * rate_; due_ >= kLine && (next_ != end_ || next_block()); due_ -= kLine) __builtin_prefetch(line(), 0, 2);
    }
    // The next line, null after the last
    const char *next() { return next_ != end_ || next_block() ? line() : nullptr; }

  private:
    static constexpr int64_t kLine = int64_t{1} << 24;

    struct Blocks {
        int64_t first, end;
    };

    // What a sequence's only query sees
    static Blocks blocks_of(const Attention &a, int64_t query, int64_t query_end) {
        if (query_end - query != 1) return {0, 0};
        const int64_t oldest = a.window ? a.positions[query] - a.window + 1 : 0;
        return {(oldest > 0 ? oldest : 0) / a.cache.block_size, a.positions[query] / a.cache.block_size + 1};
    }
    // false: there is none any more. In line, since a call in the middle of a product would have it put all its vectors away: a sixth of the products of a step of 32
    __attribute__((always_inline)) bool next_block() {
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
    const char *line() {
        next_ += 64;
        return next_ - 64;
    }

    Attention a_{};
    const int32_t *query_starts_ = nullptr;
    int64_t sequence_ = 0, sequence_end_ = 0, block_ = 0, block_end_ = 0;
    const char *next_ = nullptr, *end_ = nullptr;
    int64_t rate_ = 0, due_ = 0;  // lines for each multiplication, and lines to be brought, in units of 1 / kLine
};

}  // namespace qforge
