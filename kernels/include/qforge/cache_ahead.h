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

    // So many multiplications are about to be done
    void fetch(int64_t products) {
        for (due_ += products * rate_; due_ >= kLine && (next_ != end_ || next_block()); due_ -= kLine) __builtin_prefetch(line(), 0, 2);
    }
    // The next line, null after the last
    const char *next() { return next_ != end_ || next_block() ? line() : nullptr; }

  private:
    static constexpr int64_t kLine = int64_t{1} << 24;

    bool next_block();  // false: there is none any more
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
