// Memory that vectors of 64 bytes take, full of NaNs.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

struct Free {
    void operator()(void *p) const { std::free(p); }
};
using Room = std::unique_ptr<void, Free>;

inline Room room(int64_t bytes) {
    const auto whole = static_cast<size_t>((bytes + 63) / 64 * 64);
    return Room(std::memset(std::aligned_alloc(64, whole), 0xFF, whole));
}
