// Random attention over a cache in int8: AMX's code on emulated tiles against plain C++, bit for bit.   attention_amx_check FIRST_SEED COUNT
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "qforge/layers.h"
#include "seeds.h"

using namespace qforge;

namespace {

bool same(unsigned seed) {
    std::mt19937 random(seed);
    const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
    const auto number = [&] { return static_cast<float>(below(20001) - 10000) / 2500.0f; };
    Cache cache{CacheType::I8, nullptr, 0, 1 + below(3), 64 * (1 + below(2)), 16 * (1 + below(3)), true, 1.0f, 1.0f};
    const int64_t group = 1 + below(4), heads = cache.kv_heads * group, queries = (16 + group - 1) / group + below(60), before = below(200), context = before + queries, d = cache.head_dim;
    const int64_t blocks = (context + cache.block_size - 1) / cache.block_size;
    cache.block_bytes = cache.layer_bytes();
    std::vector<char> memory(static_cast<size_t>(cache.block_bytes * blocks));
    for (char &c : memory) c = static_cast<char>(random());  // what another sequence left
    cache.memory = memory.data();
    std::vector<int32_t> table(static_cast<size_t>(blocks));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), random);

    std::vector<float> cosines(static_cast<size_t>(context * d / 2)), sines(cosines.size()), out(static_cast<size_t>(context * heads * d), -1.0f);
    for (size_t i = 0; i < cosines.size(); ++i) {
        const float angle = number();
        cosines[i] = std::cos(angle);
        sines[i] = std::sin(angle);
    }
    std::vector<int64_t> positions(static_cast<size_t>(context)), slots(positions.size());
    for (int64_t t = 0; t < context; ++t) {
        positions[static_cast<size_t>(t)] = t;
        slots[static_cast<size_t>(t)] = table[static_cast<size_t>(t / cache.block_size)] * cache.block_size + t % cache.block_size;
    }
    std::vector<float> qkv(static_cast<size_t>(context * (heads + 2 * cache.kv_heads) * d));
    const float size = below(4) ? 1.0f : 30.0f;  // scores that differ much: most weights are 0
    for (float &v : qkv) v = size * number();
    if (below(4) == 0) qkv[static_cast<size_t>(below(static_cast<int64_t>(qkv.size())))] = below(2) ? NAN : INFINITY;
    if (below(4) == 0) std::fill_n(qkv.begin() + below(context) * (heads + 2 * cache.kv_heads) * d, heads * d, 0.0f);
    const Attention a{cache, qkv.data(), out.data(), heads, below(2) ? 0 : context + below(50), 0.125f, nullptr, nullptr, 1e-5f, cosines.data(), sines.data(), positions.data(), slots.data(), table.data(), blocks};
    layers_portable.rotate_and_store(a, 0, context);
    layers_portable.clear_after(a, context - 1);

    std::vector<float> few(static_cast<size_t>(attention_scratch_floats(a, context))), tiles(static_cast<size_t>(tile_attention_amx.scratch_bytes(a, context)) / sizeof(float) + 16, NAN);
    auto *aligned = reinterpret_cast<float *>((reinterpret_cast<uintptr_t>(tiles.data()) + 63) / 64 * 64);
    for (int64_t h = 0; h < cache.kv_heads; ++h) {
        const AttentionPiece piece{before, context, 0, h};
        if (!tile_attention_amx.takes(a, piece)) return std::printf("seed %u: not taken\n", seed), false;
        layers_portable.attend(a, piece, few.data());
    }
    const std::vector<float> wanted = out;
    std::fill(out.begin(), out.end(), -1.0f);
    for (int64_t h = 0; h < cache.kv_heads; ++h) tile_attention_amx.attend(a, {before, context, 0, h}, aligned);
    for (size_t i = 0; i < wanted.size(); ++i)
        if (std::memcmp(&wanted[i], &out[i], sizeof(float)) != 0 && !(std::isnan(wanted[i]) && std::isnan(out[i])))
            return std::printf("seed %u: %d heads of %d, group %d, blocks of %d, positions %d to %d, number %d: %g in plain C++, %g by tiles\n", seed, static_cast<int>(heads), static_cast<int>(d),
                               static_cast<int>(group), static_cast<int>(cache.block_size), static_cast<int>(before), static_cast<int>(context), static_cast<int>(i), wanted[i], out[i]),
                   false;
    return true;
}

}  // namespace

int main(int, char **given) { return all_the_same(given, same); }
