// AMX's tiles in plain C++, by the pseudocode of Intel's manual: included before a source that uses them, it runs where there are none.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace emulated {

struct Tile {
    int rows = 0, bytes = 0;  // of a row
    uint8_t data[16][64] = {};
};

inline thread_local Tile tiles[8];

inline void configure(const void *config) {
    const auto *bytes = static_cast<const uint8_t *>(config);
    for (int i = 0; i < 8; ++i) {
        uint16_t columns;
        std::memcpy(&columns, bytes + 16 + 2 * i, 2);
        tiles[i] = Tile{bytes[48 + i], columns};
    }
}

inline void load(int tile, const void *from, int64_t stride) {
    for (int r = 0; r < tiles[tile].rows; ++r) std::memcpy(tiles[tile].data[r], static_cast<const char *>(from) + r * stride, static_cast<size_t>(tiles[tile].bytes));
}

inline void store(int tile, void *to, int64_t stride) {
    for (int r = 0; r < tiles[tile].rows; ++r) std::memcpy(static_cast<char *>(to) + r * stride, tiles[tile].data[r], static_cast<size_t>(tiles[tile].bytes));
}

inline void zero(int tile) { std::memset(tiles[tile].data, 0, sizeof(tiles[tile].data)); }

// TDPBSSD and, of unsigned bytes in a, TDPBUSD; shapes that do not fit end the process, as they would raise an exception
template <typename A>
inline void multiply(int to, int a, int b) {
    Tile &sum = tiles[to];
    if (tiles[a].bytes / 4 != tiles[b].rows || tiles[a].rows != sum.rows || tiles[b].bytes != sum.bytes) __builtin_trap();
    for (int m = 0; m < sum.rows; ++m)
        for (int n = 0; n < sum.bytes / 4; ++n) {
            int32_t value;
            std::memcpy(&value, &sum.data[m][4 * n], 4);
            for (int k = 0; k < tiles[a].bytes; ++k) value += static_cast<A>(tiles[a].data[m][k]) * static_cast<int8_t>(tiles[b].data[k / 4][4 * n + k % 4]);
            std::memcpy(&sum.data[m][4 * n], &value, 4);
        }
}

inline float flushed(float v) { return std::fabs(v) < std::numeric_limits<float>::min() ? 0.0f : v; }

inline float bf16(const uint8_t *at) {
    uint16_t bits;
    std::memcpy(&bits, at, 2);
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float v;
    std::memcpy(&v, &wide, 4);
    return flushed(v);
}

// TDPBF16PS: even and odd inputs apart, from 0, each product and sum fused
inline void multiply_bf16(int to, int a, int b) {
    Tile &sum = tiles[to];
    if (tiles[a].bytes / 4 != tiles[b].rows || tiles[a].rows != sum.rows || tiles[b].bytes != sum.bytes) __builtin_trap();
    for (int m = 0; m < sum.rows; ++m)
        for (int n = 0; n < sum.bytes / 4; ++n) {
            float value, sums[2] = {0, 0};
            std::memcpy(&value, &sum.data[m][4 * n], 4);
            for (int k = 0; k < tiles[a].bytes / 2; ++k) sums[k % 2] = flushed(std::fma(bf16(&tiles[a].data[m][2 * k]), bf16(&tiles[b].data[k / 2][4 * n + k % 2 * 2]), sums[k % 2]));
            value = flushed(value + flushed(sums[0] + sums[1]));
            std::memcpy(&sum.data[m][4 * n], &value, 4);
        }
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbusd
#undef _tile_stream_loadd
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) emulated::configure(config)
#define _tile_release() static_cast<void>(0)
#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_zero(tile) emulated::zero(tile)
#define _tile_dpbssd(to, a, b) emulated::multiply<int8_t>(to, a, b)
#define _tile_dpbusd(to, a, b) emulated::multiply<uint8_t>(to, a, b)
#define _tile_stream_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_dpbf16ps(to, a, b) emulated::multiply_bf16(to, a, b)
