// Random products with activations rounded by segments, for the checks of this folder.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "qforge/blockwise.h"
#include "room.h"

namespace qforge {

// Multiples of a half with the extremes of a segment for which one unit is one code: ties
inline void halves(const Weight &w, std::vector<float> &x) {
    const float most = centered(w) ? kCenteredMost : w.activations == Activations::INT16 ? 32512.0f : 127.0f;
    for (size_t i = 0; i < x.size(); ++i) {
        const auto in_segment = static_cast<int64_t>(i) % w.block_k % segment_inputs(w);
        x[i] = in_segment == 0 ? most : in_segment == 1 ? -most : std::floor(x[i] / 2.4f) + 0.5f;
    }
}

struct BlockwiseCase {
    std::mt19937 random;
    Weight w;
    int64_t rows;
    Room codes;
    std::vector<float> scales, bias, x;
    std::vector<uint8_t> zeros;
    std::vector<uint16_t> half_scales;
    std::vector<int16_t> code_sums;
    std::vector<int32_t> pair_sums;

    explicit BlockwiseCase(unsigned seed) : random(seed) {
        constexpr int64_t lengths[] = {64, 64, 64, 64, 64, 128, 128, 128, 192, 32, 96, 72, 8, 24, 40, 120};
        w = {below(4) ? Format::INT4 : Format::INT8, 1 + below(80), 1 + below(7), lengths[below(16)], 1, nullptr, nullptr, nullptr, nullptr, nullptr, below(3) ? Activations::INT8 : Activations::INT16};
        rows = 1 + (below(4) ? below(100) : below(6));  // of few, sums of codes are made
        make_codes();
        make_scales();
        make_inputs();
    }
    int64_t below(int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); }

    // Whether both have the same bits, or no number; says where not
    bool same(unsigned seed, const std::vector<float> &wanted, const std::vector<float> &got) const {
        for (size_t i = 0; i < wanted.size(); ++i)
            if (std::memcmp(&wanted[i], &got[i], sizeof(float)) != 0 && !(std::isnan(wanted[i]) && std::isnan(got[i]))) {
                std::printf("seed %u: %d x %d, block of %d, format %d, activations %d, zero %d, row %d, column %d: %g in plain C++, %g checked\n", seed, static_cast<int>(rows), static_cast<int>(w.columns),
                            static_cast<int>(w.block_k), static_cast<int>(w.format), static_cast<int>(w.activations), w.zero, static_cast<int>(i) / static_cast<int>(w.columns),
                            static_cast<int>(i) % static_cast<int>(w.columns), wanted[i], got[i]);
                return false;
            }
        return true;
    }

  private:
    void make_codes() {
        codes = room(w.tiles() * tile_bytes(w));
        auto *bytes = static_cast<uint8_t *>(codes.get());
        constexpr uint8_t extremes[] = {0, 255, 15, 240};  // of one in four, all codes of 4 bits are the least, the largest, or either by halves of a chunk
        const int64_t kind = below(16);
        for (int64_t i = 0; i < w.tiles() * tile_bytes(w); ++i) bytes[i] = kind < 4 ? extremes[kind] : static_cast<uint8_t>(random());
        w.codes = bytes;
        if (!centered(w)) return;
        code_sums.assign(static_cast<size_t>(w.tiles() * tile_sums(w)), 0);
        w.code_sums = code_sums.data();
        for (int64_t t = 0; t < w.tiles(); ++t) {
            auto *sums = code_sums.data() + t * tile_sums(w);
            for (int64_t k = 0; k < w.inputs(); ++k)
                for (int64_t c = 0; c < kTile; ++c)
                    sums[(k / w.block_k * segments_of_block(w) + k % w.block_k / kCentered) * kTile + c] += static_cast<int16_t>(chunks_of(w, t)[k / 8 * 64 + c * 4 + k % 4] >> (k % 8 / 4 * 4) & 15);
        }
        if (w.block_k % kCentered == 0 && below(8)) make_pair_sums();
    }
    void make_pair_sums() {
        for (int64_t t = 0; t < w.tiles(); ++t)
            for (int64_t s = 0; s < tile_sums(w) / kTile; ++s)
                for (int64_t c = 0; c < kTile; ++c) {
                    int too_much = 0;
                    for (int64_t i = 0; i < kCentered / 2; ++i) {
                        const int both = chunks_of(w, t)[(s * kCentered / 8 + i / 4) * 64 + c * 4 + i % 4], first = both & 15, second = both >> 4;
                        too_much += kFirstMore * first - kSecondLess * second + (plain_chunk(static_cast<int>(t % 2), i / 4) ? 0 : first * second);
                    }
                    pair_sums.push_back((kPairsMiddle - too_much) * 65536 + code_sums_of(w, t)[s * kTile + c]);
                }
        w.pair_sums = pair_sums.data();
    }
    void make_scales() {
        const int64_t most = w.format == Format::INT8 ? 256 : 16, count = w.tiles() * w.blocks * kTile;
        scales.resize(static_cast<size_t>(count));
        for (float &s : scales) s = static_cast<float>(below(1000)) * 1e-5f;
        if (below(2))
            for (float s : scales) half_scales.push_back(half_from_float(s));
        w.zero = static_cast<int>(below(2) ? most / 2 : below(most));
        zeros.assign(static_cast<size_t>(count), static_cast<uint8_t>(w.zero));
        if (below(2)) {
            w.zero = -1;
            for (uint8_t &z : zeros) z = static_cast<uint8_t>(below(most));
        }
        bias.resize(static_cast<size_t>(w.columns));
        for (float &b : bias) b = static_cast<float>(below(2001) - 1000) * 1e-2f;
        if (half_scales.empty()) w.scales = scales.data();
        else w.half_scales = half_scales.data();
        w.zeros = zeros.data();
        if (below(3) == 0) w.bias = bias.data();
    }
    void make_inputs() {
        x.resize(static_cast<size_t>(rows * w.inputs()));
        const float middle = below(3) ? 0.0f : static_cast<float>(below(200) - 100);
        for (float &v : x) v = static_cast<float>(below(20001) - 10000) / 500.0f + middle;
        if (below(6) == 0) halves(w, x);
        if (const int64_t together = 1 << below(3); below(6) == 0)  // the largest codes; so many have one sign
            for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<int64_t>(i) / together % 2 ? -1.0f : 1.0f;
        if (below(5) == 0) x[static_cast<size_t>(below(static_cast<int64_t>(x.size())))] = below(2) ? NAN : below(2) ? INFINITY : -INFINITY;
        constexpr float factors[] = {0.0f, 0x1p-115f, 0x1p-104f, 0x1p105f};  // what has no codes, or hardly any, and what is too large around a middle
        if (const int64_t factor = below(8); factor < 4)
            for (size_t i = 0; i < x.size() / 2; ++i) x[i] *= factors[factor];
    }
};

}  // namespace qforge
